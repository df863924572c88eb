//! How long calls took, in memory that does not grow with their number.

use std::time::Duration;

/// How many calls took how long: 32 steps from each power of two nanoseconds to the next.
#[derive(Clone, Debug)]
pub struct Times {
    counts: Vec<u64>,
}

const STEPS: u64 = 32;

impl Default for Times {
    fn default() -> Times {
        Times { counts: vec![0; (40 * STEPS) as usize] }
    }
}

impl Times {
    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).clamp(STEPS, 1 << 43);
        let power = u64::from(ns.ilog2()) - 5;
        let step = power * STEPS + (ns >> power) - STEPS;
        let last = self.counts.len() - 1;
        self.counts[(step as usize).min(last)] += 1;
    }

    pub fn merge(&mut self, other: &Times) {
        for (ours, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *ours += theirs;
        }
    }

    pub fn calls(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Microseconds that this part of the calls took at most: the middle of a step, which is within a sixty-fourth of the
    /// true value from 1 us on.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let calls = self.calls();
        let rank = ((calls as f64 * part).ceil() as u64).clamp(1, calls.max(1));
        let mut up_to = 0;
        let step = self.counts.iter().position(|count| {
            up_to += count;
            up_to >= rank
        })? as u64;
        let (power, within) = (step / STEPS, step % STEPS);
        let (from, width) = ((STEPS + within) << power, 1u64 << power);
        Some((from as f64 + (width - 1) as f64 / 2.0) / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_step_of_the_truth() {
        let mut times = Times::default();
        assert_eq!(times.quantile(0.5), None);
        for us in 1..=10_000u64 {
            times.add(Duration::from_micros(us));
        }
        assert_eq!(times.calls(), 10_000);
        for (part, wanted) in
            [(0.1, 1_000.0), (0.5, 5_000.0), (0.9, 9_000.0), (0.99, 9_900.0), (0.999, 9_990.0)]
        {
            let found = times.quantile(part).unwrap();
            assert!((found / wanted - 1.0).abs() < 1.0 / STEPS as f64, "{part}: {found} for {wanted}");
        }
    }

    #[test]
    fn times_out_of_all_bounds_are_counted_at_the_ends() {
        let mut times = Times::default();
        times.add(Duration::ZERO);
        times.add(Duration::MAX);
        assert_eq!(times.calls(), 2);
        assert!(times.quantile(0.0).unwrap() < 0.1 && times.quantile(1.0).unwrap() > 1e9);
    }
}
