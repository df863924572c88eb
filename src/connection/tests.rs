//! The engine's rules, each shown by two engines joined by devices of memory ([`pair`]): no clock, no socket, no thread.
//!
//! The rules named beside the tests are those of RFC 8166, numbered in the order of the project's list of them:
//! 1 to 21 framing, 22 to 38 credits, 56 to 72 errors, 88 to 98 Long messages, 99 to 107 memory. Those that must hold
//! at any time are checked by the pair after every step of every test.
#![forbid(unsafe_code)]

mod both;
mod credits;
mod ends;
mod errors;
mod framing;
mod long;
mod pair;
mod placement;
mod random;
mod simulation;
mod two;

use super::requester::*;
use super::responder::*;
use super::*;
use crate::memory::{Given, PassStage, Program};
use crate::reserve::testing::NoLongBlocks;
use crate::wire::characteristics::{self as operations, Characteristic};
use crate::wire::header::{Proc, RdmaError};
use crate::wire::lists::Lists;
use crate::wire::{Credits, Position, ReadSegment};
use pair::*;

/// Marsaglia's xorshift: the same numbers for the same seed, which is not 0.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
