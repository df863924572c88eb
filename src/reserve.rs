//! Memory for when the system has none left: it lets a call fail where Rust would end the process.
//!
//! A vector, box or string of Rust's standard library that gets no memory aborts, and this library lives in a stranger's
//! process. Message bodies, rings and whatever else a peer or a program may make long are mapped, and a mapping that fails is
//! an error (`memory::pool`). What is left is small and everywhere. So when the heap refuses, it comes out of a reserve, which
//! costs nothing until then: zero pages of the library's own data. Once half of it is taken ([`check`]), no message gets
//! memory, so no call and no connection begins; what is under way has the other half to finish in.
//!
//! Invariants:
//! - A granule is handed out by the one compare-and-swap that marks it, so there is no lock that a fork or a signal could leave
//!   held.
//! - What is longer than [`LONGEST`] does not come from the reserve: whoever asks for that much has to be ready for a refusal.
//! - What is longer than [`LONGEST`] does not come out of here: whoever asks for that much has to be ready for a refusal.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes that are handed out together.
const GRANULE: usize = 256;
/// One bit for each granule: a run lies within one word.
const WORDS: usize = 64;
const SIZE: usize = WORDS * 64 * GRANULE;
/// Most bytes of one block.
pub const LONGEST: usize = 64 * GRANULE;

/// The heap of this library: the program's, and behind it the reserve.
pub struct Heap(Reserve);

#[global_allocator]
static HEAP: Heap = Heap(Reserve::new());

/// Fails when the system has refused so much memory that nothing new should begin.
///
/// # Errors
/// `ENOMEM`.
pub fn check() -> io::Result<()> {
    if HEAP.0.is_low() { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
}

/// All of `items`, or as many of the first ones as there is memory for. No item is taken from `items` without room for it:
/// dropping it may need a lock that the caller holds.
pub fn as_many_as_fit<T>(mut items: impl Iterator<Item = T>) -> Vec<T> {
    let mut fit = Vec::from_iter(items.next());
    while !fit.is_empty()
        && fit.try_reserve(1).is_ok()
        && let Some(item) = items.next()
    {
        fit.push(item);
    }
    fit
}

// SAFETY: a block belongs to the system or, where the system has none, to the reserve, which hands out what nobody else has. It
// goes back to where its address says that it came from.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by contract.
        let block = if is_refused(layout.size()) { null_mut() } else { unsafe { System.alloc(layout) } };
        if block.is_null() { self.0.take(layout) } else { block }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let refused = is_refused(layout.size());
        // SAFETY: by contract.
        let block = if refused { null_mut() } else { unsafe { System.alloc_zeroed(layout) } };
        if !block.is_null() {
            return block;
        }
        let block = self.0.take(layout);
        if !block.is_null() {
            // SAFETY: the reserve has given us this many bytes.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if self.0.holds(block) {
            self.0.give(block, layout);
        } else {
            // SAFETY: by contract, and the block is not from the reserve.
            unsafe { System.dealloc(block, layout) };
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !self.0.holds(block) && !is_refused(size) {
            // SAFETY: by contract, and the block is not from the reserve.
            let moved = unsafe { System.realloc(block, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        let Ok(new) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        // SAFETY: by contract the new size is not 0.
        let moved = unsafe { self.alloc(new) };
        if !moved.is_null() {
            // SAFETY: two blocks of at least this many bytes, one of which is new.
            unsafe { moved.copy_from_nonoverlapping(block, layout.size().min(size)) };
            // SAFETY: by contract.
            unsafe { self.dealloc(block, layout) };
        }
        moved
    }
}

/// Whether a test makes the system refuse this size.
#[cfg(not(test))]
const fn is_refused(_: usize) -> bool {
    false
}

#[cfg(test)]
use testing::is_refused;

/// For tests: makes the system have no memory left for this thread.
#[cfg(test)]
pub mod testing {
    use std::cell::Cell;

    use super::LONGEST;

    thread_local! {
        static REFUSES: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn is_refused(size: usize) -> bool {
        size > LONGEST && REFUSES.get()
    }

    /// While this lives, the thread gets no block that is too long for the reserve.
    pub struct NoLongBlocks(());

    impl NoLongBlocks {
        pub fn from_here() -> NoLongBlocks {
            REFUSES.set(true);
            NoLongBlocks(())
        }
    }

    impl Drop for NoLongBlocks {
        fn drop(&mut self) {
            REFUSES.set(false);
        }
    }
}

#[repr(align(4096))]
struct Bytes(UnsafeCell<[u8; SIZE]>);

struct Reserve {
    bytes: Bytes,
    /// A set bit is a granule that has been handed out.
    out: [AtomicU64; WORDS],
    /// How many granules have been handed out.
    count: AtomicUsize,
}

// SAFETY: the bytes are reached only through blocks, each of which belongs to one caller.
unsafe impl Sync for Reserve {}

impl Reserve {
    const fn new() -> Reserve {
        let bytes = Bytes(UnsafeCell::new([0; SIZE]));
        Reserve { bytes, out: [const { AtomicU64::new(0) }; WORDS], count: AtomicUsize::new(0) }
    }

    fn is_low(&self) -> bool {
        self.count.load(Relaxed) > WORDS * 64 / 2
    }

    fn holds(&self, block: *mut u8) -> bool {
        block.addr().wrapping_sub(self.bytes.0.get().addr()) < SIZE
    }

    #[cold]
    fn take(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LONGEST || layout.align() > GRANULE {
            return null_mut();
        }
        let granules = layout.size().div_ceil(GRANULE);
        let run = run(granules);
        for (index, word) in self.out.iter().enumerate() {
            let mut seen = word.load(Relaxed);
            while let Some(at) = (0..=64 - granules).find(|at| seen & (run << at) == 0) {
                match word.compare_exchange_weak(seen, seen | (run << at), AcqRel, Relaxed) {
                    Ok(_) => {
                        self.count.fetch_add(granules, Relaxed);
                        return self.bytes.0.get().cast::<u8>().wrapping_add((index * 64 + at) * GRANULE);
                    }
                    Err(now) => seen = now,
                }
            }
        }
        null_mut()
    }

    #[cold]
    fn give(&self, block: *mut u8, layout: Layout) {
        let granules = layout.size().div_ceil(GRANULE);
        let first = (block.addr() - self.bytes.0.get().addr()) / GRANULE;
        self.count.fetch_sub(granules, Relaxed);
        self.out[first / 64].fetch_and(!(run(granules) << (first % 64)), AcqRel);
    }

    /// Granules that have been handed out.
    #[cfg(test)]
    fn taken(&self) -> usize {
        let bits = self.out.iter().map(|word| word.load(Relaxed).count_ones() as usize).sum();
        assert_eq!(self.count.load(Relaxed), bits);
        bits
    }
}

/// This many bits.
fn run(granules: usize) -> u64 {
    u64::MAX >> (64 - granules.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 8).unwrap()
    }

    fn reserve() -> Box<Reserve> {
        // Not by way of the stack, which is too small for it in a thread.
        // SAFETY: its layout is not empty.
        let zeros = unsafe { std::alloc::alloc_zeroed(Layout::new::<Reserve>()) };
        // SAFETY: a reserve of zeros is a new one.
        unsafe { Box::from_raw(zeros.cast()) }
    }

    #[test]
    fn blocks_of_the_reserve_do_not_overlap_and_go_back() {
        let reserve = reserve();
        let mut blocks = vec![];
        for round in 0.. {
            let size = 1 + round * 7919 % LONGEST;
            let block = reserve.take(layout(size));
            if block.is_null() {
                break;
            }
            assert!(reserve.holds(block) && block.addr().is_multiple_of(GRANULE));
            blocks.push((block.addr(), size, block));
        }
        blocks.sort();
        assert!(blocks.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        let end = reserve.bytes.0.get().addr() + SIZE;
        assert!(blocks.last().is_some_and(|(at, size, _)| at + size <= end));
        for (_, size, block) in blocks {
            reserve.give(block, layout(size));
        }
        assert_eq!(reserve.taken(), 0);
        assert!(!reserve.take(layout(LONGEST)).is_null());
        assert!(reserve.take(layout(LONGEST + 1)).is_null());
    }

    #[test]
    fn a_list_that_gets_no_longer_block_has_the_first_of_its_items() {
        assert_eq!(as_many_as_fit([0u8; 0].into_iter()).capacity(), 0);
        assert_eq!(as_many_as_fit(0..20_000).len(), 20_000);
        let _none = testing::NoLongBlocks::from_here();
        let mut items = 0..20_000u64;
        let fit = as_many_as_fit(&mut items);
        assert_eq!(items.start, fit.len() as u64, "none is lost");
        assert_eq!((fit.len(), fit.last()), (LONGEST / 8, Some(&(LONGEST as u64 / 8 - 1))));
    }

    #[test]
    fn nothing_new_begins_once_half_of_the_reserve_is_out() {
        let reserve = reserve();
        let half = SIZE / LONGEST / 2;
        let blocks: Vec<_> = (0..half).map(|_| reserve.take(layout(LONGEST))).collect();
        assert!(!reserve.is_low());
        let one = reserve.take(layout(1));
        assert!(reserve.is_low());
        reserve.give(one, layout(1));
        assert!(!reserve.is_low() && blocks.iter().all(|block| !block.is_null()));
    }

    #[test]
    fn threads_that_take_at_the_same_time_get_blocks_of_their_own() {
        let reserve = reserve();
        std::thread::scope(|scope| {
            for mark in 1..=4u8 {
                let reserve = &*reserve;
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let size = 1 + round * 31 % 2000;
                        let block = reserve.take(layout(size));
                        if block.is_null() {
                            continue;
                        }
                        // SAFETY: the reserve has given us this many bytes.
                        unsafe { block.write_bytes(mark, size) };
                        std::thread::yield_now();
                        // SAFETY: as above.
                        let bytes = unsafe { std::slice::from_raw_parts(block, size) };
                        assert!(bytes.iter().all(|byte| *byte == mark));
                        reserve.give(block, layout(size));
                    }
                });
            }
        });
        assert_eq!(reserve.taken(), 0);
    }
}
