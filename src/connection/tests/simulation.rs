//! A simulation: engines over a network with virtual time; everything that chance decides comes from one seed.
//!
//! Most worlds have devices of memory ([`network`]), the others software iWARP over streams of bytes ([`bytes`]).
//!
//! A seed makes one [`world::World`] of a thousand calls; a run takes a seed and those that follow it. A failure names the seed
//! of its world, which is enough to run that world again alone, step by step the same. `make simulate CALLS=n SEED=s`
//!
//! What must hold, at every step: each call ends once, with its own answer byte by byte or an error, and a call that was reported
//! as not sent is never executed; requests are executed once and in their order; no handle of a call is left when it has ended;
//! no remote access fails; each Send finds a Receive that is long enough; credits are kept; at the end nothing is left over.
#![forbid(unsafe_code)]

mod bytes;
mod network;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use world::{Tally, World};

/// Runs worlds until they have made `calls` calls.
fn simulate(calls: u64, first: u64) -> Tally {
    let mut tally = Tally::default();
    let mut seed = first;
    while tally.calls < calls {
        match catch_unwind(AssertUnwindSafe(|| World::run(seed))) {
            Ok(world) => tally.add(&world),
            Err(panic) => {
                eprintln!("the simulation fails; once more: make simulate CALLS=1 SEED={seed}");
                resume_unwind(panic);
            }
        }
        seed = seed.wrapping_add(1);
    }
    tally
}

/// A number that the environment may give.
fn told(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

fn fresh_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

#[test]
fn a_seed_replays_exactly() {
    let mut traces = Vec::new();
    for seed in 0..20 {
        let first = World::run(seed);
        assert_eq!(first, World::run(seed), "seed {seed}");
        traces.push(first.trace);
    }
    traces.sort_unstable();
    traces.dedup();
    assert_eq!(traces.len(), 20, "seeds make different worlds");
}

/// Worlds that are the same each time, and worlds that are new each time.
#[test]
fn a_sample_of_simulated_worlds() {
    for first in [1, fresh_seed()] {
        let tally = simulate(20_000, first);
        // The mix is worth something only while it reaches everything.
        let reached = [
            tally.answered,
            tally.refused,
            tally.not_sent,
            tally.lost,
            tally.abandoned,
            tally.one_way,
            tally.back,
            tally.version_two,
            tally.software,
            tally.renewals,
            tally.fallbacks,
        ];
        assert!(first != 1 || reached.iter().all(|count| *count > 10), "{tally:?}");
    }
}

/// `make simulate CALLS=n SEED=s`
#[test]
#[ignore = "as long as it is told to: make simulate"]
fn as_many_calls_as_are_told() {
    let calls = told("SIMULATE_CALLS").unwrap_or(1_000_000);
    let seed = told("SIMULATE_SEED").unwrap_or_else(fresh_seed);
    println!("make simulate CALLS={calls} SEED={seed}");
    let start = std::time::Instant::now();
    let tally = simulate(calls, seed);
    println!("{:.0} calls a second; {tally:?}", tally.calls as f64 / start.elapsed().as_secs_f64());
}
