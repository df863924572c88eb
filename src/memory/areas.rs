//! Memory for a device that must know it beforehand, in blocks of one length: for Reply chunks, and for what a peer reads.
//!
//! Registering room for the longest reply that a program may expect takes milliseconds, far longer than a call, and registering a
//! few KiB takes as long as a call. So a connection to an adapter has such blocks, which are registered once and used by one call
//! after another; calls at the same time get further blocks, which stay too. All blocks of a process together are bounded, since
//! their memory is locked: where none is left, a call waits (`Areas::lacks`), or, if it needs little, has memory registered for
//! itself.
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Buf, Slabs};

/// The blocks of one connection.
pub struct Areas {
    size: usize,
    /// Most bytes of the blocks of this process.
    most: usize,
    /// Whether a call waits for a block where none is left.
    scarce: bool,
    /// See [`Areas::stay_open`].
    open: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: Vec<Area>,
    /// See [`Areas::refuse`].
    refused: bool,
    ended: bool,
}

/// One block. Its memory counts as locked until the last clone of this is gone; the device's registration holds one.
#[derive(Clone)]
pub struct Area {
    slabs: Arc<Slabs>,
    _share: Arc<Share>,
}

impl Area {
    /// Address and bytes.
    pub fn span(&self) -> (usize, usize) {
        self.slabs.span()
    }
}

/// Bytes of the blocks of this process.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Those of one block.
struct Share(usize);

impl Drop for Share {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Relaxed);
    }
}

/// Bytes out of `most` that are left for blocks of this process.
pub fn left(most: usize) -> usize {
    most.saturating_sub(TAKEN.load(Relaxed))
}

impl Areas {
    /// Blocks of `size` bytes, of which one is made now; `None` when the limit of `most` bytes for this process leaves no room
    /// for it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(size: usize, most: usize) -> io::Result<Option<Arc<Areas>>> {
        let areas = Areas::with(size, most, true);
        let first = areas.grow(&mut areas.state())?;
        Ok(first.then_some(areas))
    }

    /// The same, but none is made yet, and no call waits for one: a call needs so little that other memory will do.
    pub fn lazy(size: usize, most: usize) -> Arc<Areas> {
        Areas::with(size, most, false)
    }

    fn with(size: usize, most: usize, scarce: bool) -> Arc<Areas> {
        let (size, open) = (super::round_up(size), AtomicBool::new(false));
        Arc::new(Areas { size, most, scarce, open, state: Mutex::default() })
    }

    /// The peer may write the blocks at any time, as with a device that cannot revoke a right to a part of its memory: what is
    /// written there is looked at only as a copy. The blocks hold nothing but what this peer has written.
    pub fn stay_open(&self) {
        self.open.store(true, Relaxed);
    }

    /// Whether the peer may write the block at this address, whatever handle was invalidated.
    pub(super) fn is_open(&self, address: usize) -> bool {
        self.open.load(Relaxed) && self.block_of(address, 1).is_some()
    }

    /// Most bytes of the blocks of this process.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Bytes of a block.
    pub fn size(&self) -> usize {
        self.size
    }

    /// A block for `len` bytes, if they fit one and there is one left.
    pub fn take(&self, len: usize) -> Option<Buf> {
        if len > self.size {
            return None;
        }
        let mut state = self.state();
        if let Some(block) = state.blocks.iter().find_map(|block| block.slabs.take()) {
            return Some(block);
        }
        // The system may refuse, and the caller finds other memory, or does not.
        self.grow(&mut state).ok().filter(|more| *more).and_then(|_| state.blocks.last()?.slabs.take())
    }

    /// Whether a call that needs `len` bytes has to wait for the end of another.
    pub(super) fn lacks(&self, len: usize) -> bool {
        let state = self.state();
        self.scarce
            && len <= self.size
            && !state.ended
            && (state.refused || left(self.most) < self.size)
            && state.blocks.iter().all(|block| block.slabs.left() == 0)
    }

    /// The block in which these bytes lie, for the device to register it.
    pub fn block_of(&self, address: usize, len: usize) -> Option<Area> {
        let inside = |block: &&Area| {
            let (start, whole) = block.span();
            address.checked_sub(start).is_some_and(|at| at <= whole && len <= whole - at)
        };
        self.state().blocks.iter().find(inside).cloned()
    }

    /// The first block, which stays to the end.
    pub fn first(&self) -> Option<Area> {
        self.state().blocks.first().cloned()
    }

    /// The device refuses the block at this address: it is no longer given out, and no others are made.
    pub fn refuse(&self, address: usize) {
        let mut state = self.state();
        state.refused = true;
        state.blocks.retain(|block| block.span().0 != address);
    }

    /// No block is given out any more, and those that the device has let go of no longer count. What somebody is still reading
    /// stays until that is done, but is not locked.
    pub fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        state.blocks.clear();
    }

    /// Makes one more block, if the bound allows it.
    fn grow(&self, state: &mut State) -> io::Result<bool> {
        let fits = |taken: usize| taken.checked_add(self.size).filter(|sum| *sum <= self.most);
        if state.ended || state.refused || TAKEN.fetch_update(Relaxed, Relaxed, fits).is_err() {
            return Ok(false);
        }
        let share = Share(self.size);
        state.blocks.push(Area { slabs: Slabs::new(self.size, 1)?, _share: Arc::new(share) });
        Ok(true)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for Areas {
    fn drop(&mut self) {
        self.end();
    }
}

/// Held by each test that counts the bytes of the process.
#[cfg(test)]
pub(crate) static ALONE: Mutex<()> = Mutex::new(());

/// Forgets what a mock device has kept; returns how many bytes.
#[cfg(all(test, feature = "verbs"))]
pub(crate) fn forget_kept() -> usize {
    TAKEN.swap(0, Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    const SIZE: usize = 64 << 10;

    #[test]
    fn who_needs_little_waits_for_no_block() {
        let _alone = ALONE.lock().unwrap();
        let memory = Memory::new(4096, 1 << 20, 1 << 20);
        let slabs = Slabs::new(4096, 1).unwrap();
        // Other connections have all that may be locked, or nearly nothing may be.
        let others = Areas::new(SIZE, SIZE).unwrap().unwrap();
        let one = memory.connection(Some(slabs.clone()), Some(Areas::lazy(SIZE, SIZE)));
        let first = one.reply_area(SIZE).unwrap();
        assert!(one.has_room(SIZE), "a call beside one that its server is slow to answer");
        let second = one.reply_area(SIZE).unwrap();
        drop((first, second, one, others));
        // It has some, and they are all in use.
        let one = memory.connection(Some(slabs), Some(Areas::lazy(SIZE, SIZE)));
        let first = one.reply_area(SIZE).unwrap();
        assert_eq!(left(SIZE), 0);
        assert!(one.has_room(SIZE));
        let second = one.reply_area(SIZE).unwrap();
        drop((first, second, one));
        assert_eq!(left(SIZE), SIZE);
    }

    #[test]
    fn blocks_are_used_again_and_bounded_for_the_process() {
        let _alone = ALONE.lock().unwrap();
        let most = 3 * SIZE;
        let areas = Areas::new(SIZE - 1, most).unwrap().unwrap();
        let memory = Memory::new(4096, 1 << 20, 1 << 20);
        let slabs = Slabs::new(4096, 1).unwrap();
        let one = memory.connection(Some(slabs.clone()), Some(areas.clone()));
        let first = one.reply_area(SIZE).unwrap();
        let (place, known) = (first.address(), areas.first().unwrap());
        assert_eq!(known.span().0, place);
        drop(first);
        let again = one.reply_area(1).unwrap();
        assert_eq!((again.address(), areas.size(), left(most)), (place, SIZE, 2 * SIZE));
        // Others at the same time.
        let second = one.reply_area(SIZE).unwrap();
        let block = areas.block_of(second.address(), SIZE).unwrap();
        assert_ne!(block.span(), known.span());
        assert!(areas.block_of(second.address(), SIZE + 1).is_none());
        let other = Areas::new(SIZE, most).unwrap().unwrap();
        assert!(Areas::new(SIZE, most).unwrap().is_none());
        // A call waits for others of its kind; what is longer than a block has memory of its own.
        assert!(!one.has_room(SIZE) && one.has_room(SIZE + 1));
        assert_eq!(areas.block_of(one.reply_area(SIZE + 1).unwrap().address(), 1).map(drop), None);
        drop(again);
        assert!(one.has_room(SIZE));
        // At its end a connection gives back what it has, even if somebody still reads there; but not what the device holds.
        drop(known);
        areas.end();
        assert_eq!(left(most), SIZE, "the device has one of the two");
        drop(block);
        assert_eq!(left(most), 2 * SIZE);
        assert!(areas.block_of(second.address(), 1).is_none() && areas.take(1).is_none());
        assert!(one.has_room(SIZE), "it is for the device to refuse");
        drop((other, areas, one));
        assert_eq!(left(most), most);
        assert!(second.place(0, b"still there"));
    }
}
