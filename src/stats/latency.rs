//! How long calls take, by procedure: histograms with four buckets for each power of two.
//!
//! Owns which bucket a time belongs to, what a percentile of such buckets is, and who has which histogram. Which procedure has
//! which histogram is remembered outside the page, which is not to be trusted.
//!
//! # Invariants
//! - A procedure gets its histogram for good; when there is none left, the procedure is counted with all others.
//! - What a peer sends does not get one by itself: a server asks for one only when its program has answered with success.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use once_cell::race::OnceBox;
use rustix::time::{ClockId, clock_gettime};

use super::layout::{BUCKETS, HISTOGRAM_HEAD, HISTOGRAM_WORDS, HISTOGRAMS};
use super::page::{self, Page};

/// The unit: 256 ns, and the first four buckets have one each.
const UNIT: u32 = 8;

/// The bucket of a time.
#[inline]
pub fn bucket(nanos: u64) -> usize {
    let units = nanos >> UNIT;
    if units < 4 {
        return units as usize;
    }
    let power = units.ilog2() as usize;
    (4 * (power - 1) + (units >> (power - 2)) as usize - 4).min(BUCKETS - 1)
}

/// Where a bucket begins, in nanoseconds; for [`BUCKETS`], where the last but one ends.
#[cfg(any(test, feature = "tool"))]
pub fn begin(bucket: usize) -> u64 {
    let bucket = bucket.min(BUCKETS - 1);
    let units = match bucket {
        0..4 => bucket as u64,
        _ => (4 + bucket as u64 % 4) << (bucket / 4 - 1),
    };
    units << UNIT
}

/// The time in nanoseconds that `part` (0.99) of all calls did not exceed, from their number in each bucket; `None` without a
/// call. It lies in the bucket of the exact value, whose width is at most a quarter of its beginning from a microsecond on.
#[cfg(any(test, feature = "tool"))]
pub fn percentile(buckets: &[u64], part: f64) -> Option<u64> {
    let total = buckets.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
    if total == 0 {
        return None;
    }
    let rank = ((total as f64 * part).ceil() as u64).clamp(1, total);
    let mut before = 0u64;
    for (at, &calls) in buckets.iter().enumerate() {
        if before.saturating_add(calls) >= rank {
            let (low, high) = (begin(at), begin(at + 1).max(begin(at)));
            // As if the calls of a bucket were spread evenly over it.
            let within = (rank - before) as f64 / calls as f64;
            return Some(low + ((high - low) as f64 * within) as u64);
        }
        before = before.saturating_add(calls);
    }
    None
}

/// Program, version and procedure as they stand in an RPC call (RFC 5531 §9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names([u8; 12]);

impl Names {
    /// Those of a call.
    #[inline]
    pub fn of(call: &[u8]) -> Names {
        // Where there are none, these are not those of any procedure that has a histogram of its own.
        Names(call.get(12..24).and_then(|names| names.try_into().ok()).unwrap_or([0xff; 12]))
    }

    /// The procedure that they name: one that we `serve`, or else call.
    #[inline]
    pub fn procedure(self, serve: bool) -> Procedure {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = self.0;
        let number = u32::from_be_bytes;
        Procedure::new(number([a, b, c, d]), number([e, f, g, h]), number([i, j, k, l]), serve)
    }
}

/// The histogram of the request that was answered last: on most connections the next one is for the same procedure.
#[derive(Default)]
pub struct Recent(Option<(u64, Names, Histogram)>);

impl Recent {
    /// Does what [`Procedure::histogram`] does, for a request with these names.
    #[inline]
    pub fn served(&mut self, names: Names, known: impl FnOnce() -> bool) -> Option<Histogram> {
        match self.0 {
            Some((epoch, last, histogram)) if last == names && epoch == page::epoch() => Some(histogram),
            _ => self.find(names, known),
        }
    }

    #[inline(never)]
    fn find(&mut self, names: Names, known: impl FnOnce() -> bool) -> Option<Histogram> {
        let (epoch, procedure) = (page::epoch(), names.procedure(true));
        let histogram = procedure.histogram(known)?;
        // A procedure counted among all others now may still get a histogram of its own.
        if !std::ptr::eq(histogram.0, page::page()?.histogram(0)) {
            self.0 = Some((epoch, names, histogram));
        }
        Some(histogram)
    }
}

/// A procedure of a program, as one word: never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Procedure(u64);

impl Procedure {
    /// All that have no histogram of their own.
    const OTHER: u64 = 1;

    /// The procedure of a call that we make or, if we `serve` it, have received.
    #[inline]
    pub fn new(program: u32, version: u32, procedure: u32, serve: bool) -> Procedure {
        if version >= 1 << 14 || procedure >= 1 << 16 {
            return Procedure(Procedure::OTHER);
        }
        let small = version << 18 | procedure << 2 | u32::from(serve) << 1 | 1;
        Procedure(u64::from(program) << 32 | u64::from(small))
    }

    /// Where its calls are counted, if there is a page. `known` tells whether the procedure exists, and so may get a histogram of
    /// its own if it has none.
    #[inline]
    pub fn histogram(self, known: impl FnOnce() -> bool) -> Option<Histogram> {
        let page = page::page()?;
        let Procedure(word) = self;
        let first = self.first();
        if OWNERS[first].load(Relaxed) == word {
            return Some(Histogram(page.histogram(first)));
        }
        Some(Histogram(page.histogram(self.search(page, known))))
    }

    /// Where its histogram is looked for first.
    #[inline]
    fn first(self) -> usize {
        // Programs differ in their high half, procedures in the low one.
        ((self.0 >> 32).wrapping_mul(0x9e37) ^ (self.0 >> 1)) as usize % HISTOGRAMS
    }

    #[cold]
    fn search(self, page: &Page, known: impl FnOnce() -> bool) -> usize {
        let Procedure(word) = self;
        if word == Procedure::OTHER {
            return 0;
        }
        let mut may_claim = None;
        let mut known = Some(known);
        // The first is for all others.
        for at in (0..HISTOGRAMS).map(|step| (self.first() + step) % HISTOGRAMS).filter(|at| *at > 0) {
            let mut owner = OWNERS[at].load(Relaxed);
            if owner == 0 {
                if !*may_claim.get_or_insert_with(|| known.take().is_some_and(|known| known())) {
                    return 0;
                }
                match OWNERS[at].compare_exchange(0, word, Relaxed, Relaxed) {
                    Ok(_) => {
                        page.histogram(at)[0].store(word, Relaxed);
                        return at;
                    }
                    Err(other) => owner = other,
                }
            }
            if owner == word {
                return at;
            }
        }
        0
    }
}

/// Where the calls of a procedure are counted.
#[derive(Clone, Copy)]
pub struct Histogram(&'static [AtomicU64; HISTOGRAM_WORDS]);

impl Histogram {
    /// Counts a call that began at that [`clock`].
    #[inline]
    pub fn took_since(self, began: u64) {
        let nanos = clock().saturating_sub(began);
        self.0[1].fetch_add(nanos, Relaxed);
        self.0[HISTOGRAM_HEAD + bucket(nanos)].fetch_add(1, Relaxed);
    }
}

/// The time, in nanoseconds since some fixed time.
///
/// Not an Instant, whose differences take more instructions than reading the clock.
#[inline]
pub fn clock() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// The same as of the kernel's latest tick, some milliseconds ago at most, which is known without asking the processor.
#[inline]
pub fn tick() -> u64 {
    nanoseconds(ClockId::MonotonicCoarse)
}

/// The time that this thread has used a processor, in nanoseconds.
pub fn processor_time() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// The Instant of a [`clock`], to measure from and to wait from, with one look at the time. For one from before the first that
/// was asked for: the Instant of the first.
#[inline]
pub fn instant(at: u64) -> Instant {
    static FIRST: OnceBox<(u64, Instant)> = OnceBox::new();
    let (clock, first) = FIRST.get_or_init(|| Box::new((clock(), Instant::now())));
    *first + Duration::from_nanos(at.saturating_sub(*clock))
}

/// For readers of the page.
#[cfg(any(test, feature = "tool"))]
impl Procedure {
    /// The procedure of a histogram's word; `None` for 0.
    pub fn of_word(word: u64) -> Option<Procedure> {
        (word != 0).then_some(Procedure(word))
    }

    /// Program, version and procedure; `None` for all others together.
    pub fn numbers(self) -> Option<(u32, u32, u32)> {
        let Procedure(word) = self;
        let numbers = ((word >> 32) as u32, (word >> 18) as u32 & 0x3fff, (word >> 2) as u32 & 0xffff);
        (word != Procedure::OTHER).then_some(numbers)
    }

    /// Whether we have answered it; otherwise we have called it.
    pub fn is_served(self) -> bool {
        self.0 & 2 != 0
    }
}

/// Whose the histograms are.
static OWNERS: [AtomicU64; HISTOGRAMS] = [const { AtomicU64::new(0) }; HISTOGRAMS];

/// Called in a forked child, before it has a page.
pub(super) fn forget() {
    OWNERS.iter().for_each(|owner| owner.store(0, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for at in 0..BUCKETS - 1 {
            let (low, high) = (begin(at), begin(at + 1));
            assert!(low < high, "{at}");
            assert_eq!((bucket(low), bucket(high - 1)), (at, at));
            assert!(at < 4 || (high - low) * 4 <= low, "a quarter at most: {at}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert!(begin(BUCKETS - 1) > 100_000_000_000 && begin(4) <= 1_024);
        assert_eq!(begin(usize::MAX), begin(BUCKETS - 1));
    }

    #[test]
    fn percentiles_are_those_of_the_times_within_a_bucket() {
        let mut seed = 88_172_645_463_325_252u64;
        for spread in [1_000, 50_000, 20_000_000, 9_000_000_000u64] {
            let mut times: Vec<u64> = (0..10_000)
                .map(|_| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    // Some take far longer than most.
                    (seed % spread) * if seed.is_multiple_of(50) { 9 } else { 1 }
                })
                .collect();
            let mut buckets = [0; BUCKETS];
            times.iter().for_each(|time| buckets[bucket(*time)] += 1);
            times.sort_unstable();
            for part in [0.5, 0.9, 0.99, 0.999, 1.0] {
                let exact = times[((times.len() as f64 * part).ceil() as usize).max(1) - 1];
                let found = percentile(&buckets, part).unwrap();
                let width = begin(bucket(exact) + 1) - begin(bucket(exact));
                assert!(found.abs_diff(exact) <= width, "{part} of {spread}: {found}, not {exact}");
            }
        }
        assert_eq!(percentile(&[0; BUCKETS], 0.5), None);
        assert_eq!(percentile(&[], 0.5), None);
        // Hostile ones.
        assert!(percentile(&[u64::MAX; BUCKETS], 0.99).is_some());
        assert!(percentile(&[1; 1000], 1.0).is_some());
    }

    #[test]
    fn a_procedure_is_a_word_and_comes_back() {
        let call = |numbers: [u32; 3]| {
            let words = [7, 0, 2, numbers[0], numbers[1], numbers[2], 0, 0];
            words.map(u32::to_be_bytes).concat()
        };
        for numbers in [[100_003, 3, 6], [0, 0, 0], [u32::MAX, (1 << 14) - 1, 0xffff]] {
            for serve in [false, true] {
                let procedure = Names::of(&call(numbers)).procedure(serve);
                if (numbers, serve) != ([0; 3], false) {
                    assert_eq!(procedure.numbers(), Some(numbers.into()));
                    assert_eq!(procedure.is_served(), serve);
                }
                assert_eq!(Procedure::of_word(procedure.0), Some(procedure));
            }
        }
        assert_eq!(Names::of(&call([1, 1 << 14, 0])).procedure(true).numbers(), None);
        assert_eq!(Names::of(&call([1, 1, 1 << 16])).procedure(true).numbers(), None);
        assert_eq!(Names::of(&call([1, 1, 1])[..23]).procedure(true).numbers(), None);
        assert_eq!(Procedure::of_word(0), None);
    }

    #[test]
    fn a_clock_is_an_instant_and_the_time_between_two_of_them_is_the_same() {
        // The first call sets where time begins for it.
        instant(clock());
        let (began, before) = (clock(), Instant::now());
        let at = instant(began);
        let apart = at.max(before) - at.min(before);
        assert!(apart < Duration::from_secs(5), "{apart:?}");
        assert_eq!(instant(began + 1_500_000_000) - at, Duration::from_millis(1500));
    }
}
