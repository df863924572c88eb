//! One measurement: a number of threads make calls of one kind for a given time, and every call's time is counted.
//!
//! Whoever receives data checks it in every call, at one byte of each page; in each thread's first call, which is not timed,
//! at every byte.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::rpc::{self, Client, EACH};
use crate::times::Times;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Null,
    Write,
    Read,
}

impl Call {
    pub fn name(self) -> &'static str {
        match self {
            Call::Null => "null",
            Call::Write => "write",
            Call::Read => "read",
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub call: Call,
    pub bytes: u32,
    pub threads: u32,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Sample {
    pub times: Times,
    pub took: Duration,
    /// Processor time of both ends, in nanoseconds.
    pub cpu: u64,
    /// Calls in all: the timed ones, and one of each thread before them.
    pub made: u64,
}

/// Measures. `None`: it was stopped early.
///
/// # Errors
/// A call has failed, or brought something else.
pub fn measure(
    clients: &[Client],
    control: &Client,
    case: Case,
    pattern: &[u8],
    time: Duration,
    stopped: &AtomicBool,
) -> Result<Option<Sample>, String> {
    static SEEDS: AtomicU32 = AtomicU32::new(0);
    let over = AtomicBool::new(false);
    let clients = &clients[..case.threads as usize];
    let start = Barrier::new(clients.len() + 1);
    let before = control.status()?;
    let mut took = Duration::ZERO;
    let outcomes: Vec<Result<(Times, u64), String>> = thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .map(|client| {
                let (over, start) = (&over, &start);
                scope.spawn(move || {
                    let mut buffer = vec![0; if case.call == Call::Read { case.bytes as usize } else { 0 }];
                    let mut one = |each: bool| {
                        let seed = SEEDS.fetch_add(1, Relaxed) & !EACH;
                        make(client, case, pattern, &mut buffer, seed, each)
                    };
                    let mut outcome = one(true);
                    start.wait();
                    let mut times = Times::default();
                    let (cpu, mut last) = (rpc::thread_time(), Instant::now());
                    while outcome.is_ok() {
                        outcome = one(false);
                        let now = Instant::now();
                        times.add(now - last);
                        last = now;
                        if over.load(Relaxed) {
                            break;
                        }
                    }
                    // A thread that has failed ends the others.
                    over.fetch_or(outcome.is_err(), Relaxed);
                    outcome.map(|()| (times, rpc::thread_time() - cpu))
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        // In steps, so that Ctrl-C does not have to wait for the end.
        while !over.load(Relaxed) && !stopped.load(Relaxed) {
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(Duration::from_millis(20)));
        }
        over.store(true, Relaxed);
        let outcomes = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread has failed".into())))
            .collect();
        took = began.elapsed();
        outcomes
    });
    if stopped.load(Relaxed) {
        return Ok(None);
    }
    let mut sample = Sample { times: Times::default(), took, cpu: 0, made: 0 };
    for outcome in outcomes {
        let (times, cpu) = outcome?;
        sample.times.merge(&times);
        sample.cpu += cpu;
    }
    sample.made = sample.times.calls() + clients.len() as u64;
    sample.cpu += control.status()?.time.saturating_sub(before.time);
    Ok(Some(sample))
}

fn make(
    client: &Client,
    case: Case,
    pattern: &[u8],
    buffer: &mut [u8],
    seed: u32,
    each: bool,
) -> Result<(), String> {
    match case.call {
        Call::Null => client.null(),
        Call::Write => {
            let data = rpc::data(pattern, seed, case.bytes as usize);
            client.write(if each { seed | EACH } else { seed }, data)
        }
        Call::Read => {
            client.read(seed, buffer)?;
            if !rpc::is_right(pattern, seed, buffer, each) {
                return Err("the server has given other data than it should have".into());
            }
            Ok(())
        }
    }
}

/// The middle one, or the mean of the two in the middle.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[n / 2]),
        n => Some((values[n / 2 - 1] + values[n / 2]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
