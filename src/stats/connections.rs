//! The places of connections in the page.
//!
//! Which places are taken is remembered outside the page, which is not to be trusted. What describes a connection is written
//! under a sequence number; its figures are words of their own, each written by whoever has the lock of the connection.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};

use super::layout::{self, Head, SLOT_WORDS, SLOTS, Slot};
use super::page;

/// What describes a connection.
pub struct Facts {
    /// We have accepted it.
    pub accepted: bool,
    /// The descriptor that the program knows it by.
    pub fd: i32,
    /// What it goes over, in words.
    pub device: String,
    /// The other end.
    pub peer: Option<SocketAddr>,
    /// This end.
    pub local: Option<SocketAddr>,
}

/// What changes with calls and messages.
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "the words of `Slot`")]
pub struct Figures {
    pub granted: u32,
    pub in_flight: u32,
    pub open: usize,
    pub placed: u64,
}

/// A connection as others may see it, if there is a place for it.
pub struct Connection {
    /// Its words, or some that nobody reads.
    words: &'static Words,
    /// The number of its place, if it has one.
    place: Option<usize>,
    /// The [`page::epoch`] in which a place was looked for; 0: never.
    epoch: u64,
    /// It is counted among those that have no place.
    uncounted: bool,
}

type Words = [AtomicU64; SLOT_WORDS];

/// Words for connections without a place: a few, so that threads do not all write to the same ones.
static NOWHERE: [Words; 16] = [const { [const { AtomicU64::new(0) }; SLOT_WORDS] }; 16];

fn nowhere() -> &'static Words {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    &NOWHERE[NEXT.fetch_add(1, Relaxed) % NOWHERE.len()]
}

impl Default for Connection {
    fn default() -> Connection {
        Connection { words: nowhere(), place: None, epoch: 0, uncounted: false }
    }
}

impl Connection {
    /// Whether it is to be shown (again): it is not shown, or this is a child of the process that has shown it.
    #[inline]
    pub fn is_stale(&self) -> bool {
        self.epoch != page::epoch()
    }

    /// Shows it, if there is a page.
    pub fn show(&mut self, facts: impl FnOnce() -> Facts) {
        self.hide();
        self.epoch = page::epoch();
        let Some(page) = page::page() else { return };
        match claim() {
            Some(at) => {
                self.words = page.slot(at);
                self.place = Some(at);
                write(self.words, &facts());
            }
            None => {
                self.uncounted = true;
                let without = WITHOUT.fetch_add(1, Relaxed) + 1;
                page.head(Head::WithoutSlot).store(without as u64, Relaxed);
            }
        }
    }

    /// Adds to one of its figures. Only for whoever has the lock of the connection.
    #[inline]
    pub fn add(&self, word: Slot, n: u64) {
        let word = &self.words[word as usize];
        word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Sets one of its figures.
    #[inline]
    pub fn put(&self, word: Slot, n: u64) {
        self.words[word as usize].store(n, Relaxed);
    }

    /// Sets what changes with each message.
    #[inline]
    pub fn set(&self, figures: Figures) {
        self.put(Slot::Granted, figures.granted.into());
        self.put(Slot::InFlight, figures.in_flight.into());
        self.put(Slot::Open, figures.open as u64);
        self.put(Slot::BytesPlaced, figures.placed);
    }

    fn hide(&mut self) {
        let (words, place) = (std::mem::replace(&mut self.words, nowhere()), self.place.take());
        let uncounted = std::mem::take(&mut self.uncounted);
        // This process must not give back what a parent has taken.
        if !page::is_own(self.epoch) {
            return;
        }
        if let Some(at) = place {
            change(words, |slot| slot[Slot::End as usize].store(0, Relaxed));
            TAKEN[at].store(false, Release);
        }
        if uncounted {
            let without = WITHOUT.fetch_sub(1, Relaxed).saturating_sub(1);
            if let Some(page) = page::page() {
                page.head(Head::WithoutSlot).store(without as u64, Relaxed);
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.hide();
    }
}

/// The places that are taken.
static TAKEN: [AtomicBool; SLOTS] = [const { AtomicBool::new(false) }; SLOTS];

/// Connections without one.
static WITHOUT: AtomicUsize = AtomicUsize::new(0);

/// A free place.
fn claim() -> Option<usize> {
    let free = |at: &usize| {
        !TAKEN[*at].load(Relaxed) && TAKEN[*at].compare_exchange(false, true, AcqRel, Relaxed).is_ok()
    };
    (0..SLOTS).find(free)
}

/// Called in a forked child, before it has a page.
pub(super) fn forget() {
    TAKEN.iter().for_each(|taken| taken.store(false, Relaxed));
    WITHOUT.store(0, Relaxed);
}

/// Writes what describes a connection, with all figures 0.
fn write(slot: &Words, facts: &Facts) {
    change(slot, |slot| {
        let put = |from: Slot, words: &[u64]| {
            for (place, word) in slot[from as usize..].iter().zip(words) {
                place.store(*word, Relaxed);
            }
        };
        slot[Slot::Version as usize..].iter().for_each(|word| word.store(0, Relaxed));
        put(Slot::Since, &[page::now()]);
        put(Slot::Fd, &[facts.fd as u64]);
        put(Slot::Device, &layout::text::<8>(&facts.device));
        put(Slot::Peer, &layout::address(facts.peer));
        put(Slot::Local, &layout::address(facts.local));
        put(Slot::End, &[1 + u64::from(facts.accepted)]);
    });
}

/// Changes what describes a connection: a reader finds the sequence number odd, or different from before.
fn change(slot: &Words, f: impl FnOnce(&Words)) {
    let sequence = &slot[Slot::Sequence as usize];
    let before = sequence.load(Acquire) & !1;
    sequence.store(before | 1, Relaxed);
    fence(Release);
    f(slot);
    sequence.store(before.wrapping_add(2), Release);
}
