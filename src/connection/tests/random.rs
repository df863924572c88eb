//! A random model: whatever is done in whatever order, every rule holds.
#![forbid(unsafe_code)]

use super::*;

/// rule 6, rule 12, rule 22, rule 23, rule 24, rule 26, rule 27, rule 37, rule 100: all of them at every step.
#[test]
fn whatever_is_done_in_whatever_order_every_rule_holds_at_every_step() {
    const SEEDS: u64 = 20;
    const OPERATIONS: usize = 1000;
    let (mut replies, mut orphans, mut starved, mut refused) = (0, 0, 0, 0);
    for seed in 1..=SEEDS {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let settings = |random: &mut Random| Settings {
            many_chunks: random.below(2) == 1,
            remote_invalidation: random.below(2) == 1,
            credits: random.pick(&[1, 2, 3, 8, 32]),
            inline: random.pick(&[1024, 2048, 4096]),
            max_call: random.pick(&[9000, 20_000, 1 << 20]),
            ..SETTINGS
        };
        let setup = Setup {
            client: settings(&mut random),
            server: settings(&mut random),
            max_segment: random.pick(&[600, 1000, 4096, 1 << 20]),
            read_depth: 16,
        };
        let mut pair = Pair::with(setup);
        let inline = setup.client.inline.min(setup.server.inline);
        let sizes =
            [4, 8, 12, 100, inline - 49, inline - 48, inline - 47, inline - 28, inline - 27, inline, 8999];
        let mut xid = 0;
        for _ in 0..OPERATIONS {
            pair.wire.clear();
            match random.below(24) {
                0..=3 => {
                    xid += 1;
                    let (len, reply) = (random.pick(&sizes).max(12), random.pick(&sizes));
                    // Now and then the program underestimates its reply.
                    let max_reply = if random.below(5) == 0 { random.pick(&sizes) } else { reply };
                    pair.start(xid, len, reply, reply_of(max_reply));
                }
                // As a driver does: never with the last credit.
                4 if pair.client.engine.credits_left() > 1 => {
                    xid += 1;
                    pair.one_way(xid, random.pick(&sizes).max(12));
                }
                5 => {
                    let open: Vec<u32> =
                        pair.made.iter().filter(|(_, m)| m.outcome.is_none()).map(|(xid, _)| *xid).collect();
                    if !open.is_empty() && random.below(3) == 0 {
                        pair.abandon(random.pick(&open));
                        orphans += 1;
                    }
                }
                6 | 7 => drop(pair.deliver(Client)),
                8 | 9 => drop(pair.read()),
                10 | 11 => drop(pair.deliver(Server)),
                12..=15 => {
                    // One-way calls are done in their turn, as in a loop that serves one request at a time.
                    if pair.take() && pair.made[&pair.handed.last().unwrap().xid.0].one_way {
                        pair.discard(pair.handed.len() - 1);
                    }
                }
                _ if pair.handed.is_empty() => {}
                16 if random.below(4) == 0 => {
                    // The program drops a request; its caller loses patience.
                    let at = random.below(pair.handed.len());
                    let dropped = pair.handed[at].xid.0;
                    pair.discard(at);
                    if pair.pending(dropped) {
                        pair.abandon(dropped);
                    }
                }
                _ => {
                    let at = random.below(pair.handed.len());
                    match pair.answer(at) {
                        Ok(()) => replies += 1,
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::TooLong);
                            refused += 1;
                        }
                    }
                }
            }
            if random.below(2) == 0 {
                pair.step();
            }
            assert!(!pair.closing);
            let idle = pair.handed.is_empty() && !pair.server.engine.request_ready();
            if pair.client.engine.starved() && idle && !pair.step() {
                starved += 1;
                assert_eq!(pair.client.engine.credits_left(), 0);
                pair.close(Error::new(Kind::ConnectionLost, "starved"));
                all_ended(&pair);
                pair = Pair::with(setup);
            }
        }
        while pair.step() || pair.take() || !pair.handed.is_empty() {
            if !pair.handed.is_empty() {
                let _ = pair.answer(0);
            }
        }
        if !pair.client.engine.starved() {
            all_ended(&pair);
            // One-way calls after the last reply and dropped calls hold their credits and their memory, nothing else.
            let unwanted = pair.client.engine.common.window.abandoned();
            assert_eq!(pair.client.engine.common.window.in_flight(), unwanted);
        }
        pair.close(Error::new(Kind::ConnectionLost, "the end"));
        all_ended(&pair);
    }
    // The mix is worth something only while it reaches everything.
    assert!(
        replies > 1000 && orphans > 100 && starved > 0 && refused > 20,
        "{replies} {orphans} {starved} {refused}"
    );
}

fn all_ended(pair: &Pair) {
    for (xid, made) in &pair.made {
        assert!(made.outcome.is_some() != made.abandoned, "call {xid} has no end");
    }
}
