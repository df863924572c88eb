//! Where the memory of messages comes from: blocks of one length that are kept warm, and slabs that a device knows.
//!
//! A block is an anonymous mapping of its own, or a part of one that a device has registered ([`Slabs`]), or memory lent by the
//! program; only the first kind is pooled.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::thread;
use std::time::Duration;

use super::shared::Own;
use super::{Block, Buf, Share};
use crate::{fork, reserve, stats};

/// Granularity of blocks, in bytes.
pub(super) const PAGE: usize = 4096;

/// A stock of blocks of one kind, each kept warm after use.
///
/// Every idle block keeps its pages up to `warm` bytes. A block keeps more while all idle blocks together keep less than
/// `idle_max` times that (with the blocks that come after it, less than twice as much in all). What lies above is given back to
/// the system, so that one long message does not hold its memory for ever. At most `idle_max` blocks are kept, plus one.
///
/// While one long message, or one block too many of at least [`LONG`], follows another within [`SERIES`], the idle blocks may
/// keep [`SERIES_MOST`] together: giving pages back and getting them again takes longer than copying what is in them. That ends
/// with the next block given back after such a time, or with [`Pool::cool`].
///
/// A child that was forked while a thread of its parent held the lock does without idle blocks: nobody there would ever release
/// it.
pub struct Pool {
    /// One idle block apart from the others, for a thread that gives one back and takes one again: it needs no lock. NULL, or
    /// from [`Arc::into_raw`].
    hot: AtomicPtr<Block>,
    pub(super) idle: Mutex<Idle>,
    /// The process that made the pool, and the latest process in which the lock is held by a thread that does not exist there; 0:
    /// none.
    process: u32,
    orphaned: AtomicU32,
    pub(super) capacity: usize,
    warm: usize,
    idle_max: usize,
    /// When a long message was last given back, by [`stats::tick`]; 0: none was.
    long: AtomicU64,
    /// Whether idle blocks keep more than they do without a series.
    keeps: AtomicBool,
}

/// All pools of the process.
static ALL: fork::Lock<Vec<Weak<Pool>>> = fork::Lock::new();

/// Runs `map`. Where it finds no memory, runs it once more without the idle blocks of all pools: these keep the length to which
/// they have grown, and where address space is limited, the next message needs that.
fn mapped_beside_idle<T>(map: impl Fn() -> io::Result<T>) -> io::Result<T> {
    map().or_else(|_| {
        // Nothing here allocates: there is no memory.
        ALL.lock().iter().filter_map(Weak::upgrade).for_each(|pool| pool.forget_idle());
        map()
    })
}

/// Long messages are a series while each is given back within this time after the one before.
pub const SERIES: Duration = Duration::from_secs(1);
/// Bytes that idle blocks keep then: one message of 32 MiB, or two of 16. A client, whose process nobody wakes, keeps them until
/// its next call.
const SERIES_MOST: usize = 36 << 20;
/// There may be thousands of shorter blocks, and each saves only a page or two.
const LONG: usize = 64 << 10;

/// The idle blocks of a pool, in the order in which they were given back: the latest one last.
#[derive(Default)]
pub(super) struct Idle {
    blocks: Vec<Share>,
    /// Of all of them: their bytes, and how many of those may have pages.
    bytes: usize,
    pages: usize,
}

impl Idle {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    fn insert(&mut self, at: usize, block: Share) {
        self.bytes += block.raw.cap;
        self.pages += block.raw.pages();
        self.blocks.insert(at, block);
    }

    fn remove(&mut self, at: usize) -> Share {
        let block = self.blocks.remove(at);
        self.bytes -= block.raw.cap;
        self.pages -= block.raw.pages();
        block
    }

    fn pop(&mut self) -> Option<Share> {
        let last = self.len().checked_sub(1)?;
        Some(self.remove(last))
    }

    /// The latest one of this writer, or else the one that has been idle longest: its writer misses it least.
    fn take_for(&mut self, writer: u64) -> Option<Share> {
        let own = self.blocks.iter().rposition(|block| block.raw.writer == writer);
        (self.len() > 0).then(|| self.remove(own.unwrap_or(0)))
    }

    /// Gives all but the latest `most` back to the system.
    fn forget_oldest(&mut self, most: usize) {
        let count = self.len().saturating_sub(most);
        for mut block in self.blocks.drain(..count) {
            self.bytes -= block.raw.cap;
            self.pages -= block.raw.pages();
            block.forget_pool();
        }
    }

    /// Makes each keep at most `warm` bytes of pages.
    fn trim(&mut self, warm: usize) {
        for block in &mut self.blocks {
            let before = block.raw.pages();
            if let Some(block) = block.alone() {
                block.raw.trim(warm);
            }
            self.pages -= before - block.raw.pages();
        }
    }
}

impl Pool {
    /// A pool of blocks of `capacity` bytes (rounded up to a page), keeping `idle_max` idle blocks with at most
    /// `warm` bytes of pages each.
    pub fn new(capacity: usize, warm: usize, idle_max: usize) -> Arc<Pool> {
        let pool = Arc::new(Pool {
            hot: AtomicPtr::new(null_mut()),
            idle: Mutex::default(),
            process: std::process::id(),
            orphaned: AtomicU32::new(0),
            capacity: round_up(capacity.max(1)),
            warm: round_up(warm),
            idle_max,
            long: AtomicU64::new(0),
            keeps: AtomicBool::new(false),
        });
        let mut all = ALL.lock();
        all.retain(|pool| pool.strong_count() > 0);
        all.push(Arc::downgrade(&pool));
        drop(all);
        pool
    }

    /// Takes a block, an idle one if there is one. The `Buf` starts empty.
    ///
    /// # Errors
    /// `ENOMEM` when the mapping fails.
    pub fn take(self: &Arc<Pool>) -> io::Result<Buf> {
        let idle = self.take_hot().or_else(|| self.take_idle());
        self.wrap(idle)
    }

    fn take_idle(&self) -> Option<Share> {
        let mut block = self.idle()?.pop()?;
        block.begin_use();
        Some(block)
    }

    /// Takes a block as `take` does, for bytes of a peer: what any writer but `writer` has left in the block is gone.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub(super) fn take_for(self: &Arc<Pool>, writer: u64) -> io::Result<Buf> {
        let idle = self.idle().and_then(|mut idle| idle.take_for(writer));
        let idle = idle.map(|mut block| {
            block.begin_use();
            block
        });
        let mut buf = self.wrap(idle)?;
        let raw = &mut buf.block_mut().raw;
        if raw.writer != writer {
            // So that little has to be overwritten.
            raw.trim(self.warm.max(PAGE));
            raw.scrub();
            raw.writer = writer;
        }
        Ok(buf)
    }

    fn wrap(self: &Arc<Pool>, idle: Option<Share>) -> io::Result<Buf> {
        reserve::check()?;
        #[cfg(test)]
        ration::take()?;
        let block = match idle {
            Some(block) => block,
            None => Share::new(RawBlock::map(self.capacity)?, Arc::downgrade(self)),
        };
        Ok(Buf { block, start: 0, len: 0 })
    }

    /// The idle blocks; `None` where a thread that fork(2) has left behind holds them.
    pub(super) fn idle(&self) -> Option<MutexGuard<'_, Idle>> {
        let at_once = || match self.idle.try_lock() {
            Ok(idle) => Some(idle),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(idle) = at_once() {
            return Some(idle);
        }
        let process = std::process::id();
        if process == self.process {
            return Some(self.idle.lock().unwrap_or_else(|e| e.into_inner()));
        }
        if self.orphaned.load(Relaxed) == process {
            return None;
        }
        // A thread of this process holds them for less than a microsecond, unless it lost its processor meanwhile.
        for n in 0..220 {
            if n < 200 {
                thread::yield_now()
            } else {
                thread::sleep(Duration::from_millis(1))
            }
            if let Some(idle) = at_once() {
                return Some(idle);
            }
        }
        self.orphaned.store(process, Relaxed);
        None
    }

    /// Gives the idle blocks back to the system.
    fn forget_idle(&self) {
        let idle = self.idle().map(|mut idle| std::mem::take(&mut *idle)).unwrap_or_default();
        self.take_hot().into_iter().chain(idle.blocks).for_each(|mut block| block.forget_pool());
    }

    /// Takes the block that is kept apart.
    #[inline]
    pub(super) fn take_hot(&self) -> Option<Share> {
        let hot = self.hot.swap(null_mut(), Acquire);
        // SAFETY: what is not NULL came from `Arc::into_raw` in `put_hot`; the exchange has given it to us alone.
        (!hot.is_null()).then(|| Share(ManuallyDrop::new(unsafe { Arc::from_raw(hot) })))
    }

    /// Keeps a block apart; returns it if there is one already.
    #[inline]
    fn put_hot(&self, block: Share) -> Result<(), Share> {
        if !self.hot.load(Relaxed).is_null() {
            return Err(block);
        }
        let mut block = ManuallyDrop::new(block);
        // SAFETY: `block` is not used any more, nor dropped.
        let hot = Arc::into_raw(unsafe { ManuallyDrop::take(&mut block.0) }).cast_mut();
        match self.hot.compare_exchange(null_mut(), hot, Release, Relaxed) {
            Ok(_) => Ok(()),
            // SAFETY: `hot` is from just above, and nobody has got it.
            Err(_) => Err(Share(ManuallyDrop::new(unsafe { Arc::from_raw(hot) }))),
        }
    }

    /// Takes back a block that nobody else holds.
    pub(super) fn give_back(&self, mut block: Share) {
        let was_long = block.raw.touched.load(Relaxed) > self.warm.max(PAGE);
        let long = block.raw.pages() > self.warm.max(PAGE) || self.keeps.load(Relaxed);
        // A block for Reply chunks is looked up by its writer.
        if !long && self.idle_max > 0 && block.raw.writer == 0 {
            match self.put_hot(block) {
                Ok(()) => return,
                Err(back) => block = back,
            }
        }
        let Some(mut idle) = self.idle() else { return block.forget_pool() };
        let many = idle.len() >= self.idle_max;
        if (long || many) && !self.keeps_for_now(&mut block, was_long || many, &mut idle) {
            drop(idle);
            return block.forget_pool();
        }
        // In a series, blocks with pages are taken first; of blocks that are alike, the latest one, which is in the caches.
        let is_long = |block: &Share| block.raw.pages() > self.warm;
        let last = long && !was_long && block.raw.writer == 0 && !is_long(&block);
        let at = if last && idle.blocks.last().is_some_and(is_long) { 0 } else { idle.len() };
        idle.insert(at, block);
    }

    /// Bytes of its idle blocks; nobody else uses the pool meanwhile.
    #[cfg(test)]
    pub(super) fn idle_bytes(&self) -> usize {
        let hot = self.take_hot();
        let idle = self.idle();
        let bytes =
            hot.as_ref().map_or(0, |block| block.raw.cap) + idle.as_ref().map_or(0, |idle| idle.bytes);
        drop(idle);
        if let Some(hot) = hot {
            assert!(self.put_hot(hot).is_ok());
        }
        bytes
    }

    /// Whether to keep this block among the idle ones, although it, or others, have pages of a long message, or it is one too
    /// many. `counts`: it is such a block itself. A program that sends or gets such messages again and again finds their pages,
    /// where nobody else needs them.
    #[cold]
    fn keeps_for_now(&self, block: &mut Share, counts: bool, idle: &mut Idle) -> bool {
        let now = stats::tick();
        let before = if counts { self.long.swap(now, Relaxed) } else { self.long.load(Relaxed) };
        let is_series = is_series(before, now);
        if !is_series {
            self.trim_idle(idle);
        }
        let always = self.idle_max * self.warm;
        let left = if is_series { SERIES_MOST } else { always }.saturating_sub(idle.pages);
        if let Some(block) = block.alone() {
            block.raw.trim(self.warm.max(left).max(PAGE));
        }
        let bytes = idle.bytes + block.raw.cap;
        let lasts = is_series && self.capacity >= LONG && bytes <= SERIES_MOST;
        let may = idle.len() < self.idle_max || lasts;
        let many = idle.len() + usize::from(may) > self.idle_max;
        let long = idle.pages + block.raw.pages() > always;
        self.keeps.store(is_series && (many || long), Relaxed);
        may
    }

    /// Gives back what a series has left.
    fn trim_idle(&self, idle: &mut Idle) {
        if self.keeps.load(Relaxed) {
            idle.forget_oldest(self.idle_max);
            idle.trim(self.warm.max(PAGE));
            self.keeps.store(false, Relaxed);
        }
    }

    /// Gives back what a series has left, if it is over; returns when to ask again, if it is not.
    pub(super) fn cool(&self, now: u64) -> Option<Duration> {
        if !self.keeps.load(Relaxed) {
            return None;
        }
        let long = self.long.load(Relaxed);
        if is_series(long, now) {
            return Some(SERIES.saturating_sub(Duration::from_nanos(now.saturating_sub(long))));
        }
        match self.idle() {
            Some(mut idle) => self.trim_idle(&mut idle),
            None => self.keeps.store(false, Relaxed),
        }
        None
    }

    /// Pretends that the latest long message was given back at that time; returns when it was.
    #[cfg(test)]
    pub(super) fn set_long(&self, at: u64) -> u64 {
        self.long.swap(at, Relaxed)
    }

    /// Whether there is something to [`Pool::cool`].
    #[inline]
    pub(super) fn keeps(&self) -> bool {
        self.keeps.load(Relaxed)
    }
}

/// Whether `now` is within a series whose latest long message was given back at `before`; 0: none was.
fn is_series(before: u64, now: u64) -> bool {
    before != 0 && now.saturating_sub(before) < SERIES.as_nanos() as u64
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.take_hot());
    }
}

/// A mapping cut into blocks of one length, so that a device can register all of them at once.
///
/// A block that grows is replaced by one of another pool, which the device does not know.
pub struct Slabs {
    whole: RawBlock,
    size: usize,
    /// Blocks that may be taken; there is room for more.
    count: AtomicUsize,
    /// The pool of the block that replaces one that grows.
    pub(super) larger: OnceLock<Arc<Pool>>,
    /// Offsets of the blocks that nobody has.
    free: Mutex<Vec<usize>>,
}

impl Slabs {
    /// `count` blocks of `size` bytes each, rounded up to a page.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(size: usize, count: usize) -> io::Result<Arc<Slabs>> {
        Slabs::with_room(size, count, count)
    }

    /// The same, with room for `most` blocks, which [`Slabs::grow`] makes use of.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn with_room(size: usize, count: usize, most: usize) -> io::Result<Arc<Slabs>> {
        let size = round_up(size.max(1));
        let len =
            size.checked_mul(most.max(count)).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let whole = RawBlock::map(len.max(PAGE))?;
        let free = Mutex::new((0..count).rev().map(|n| n * size).collect());
        Ok(Arc::new(Slabs { whole, size, count: AtomicUsize::new(count), larger: OnceLock::new(), free }))
    }

    /// Grows to `count` blocks in all, as far as there is room: the device already knows the new ones.
    pub fn grow(&self, count: usize) {
        let mut free = self.free();
        let most = self.whole.cap / self.size;
        let before = self.count.fetch_max(count.min(most), Relaxed);
        free.extend((before..count.min(most)).map(|n| n * self.size));
    }

    /// Takes a block, which starts empty, if there is one left.
    pub fn take(self: &Arc<Slabs>) -> Option<Buf> {
        let at = self.free().pop()?;
        // SAFETY: `at + size` is at most the length of the mapping: `at` is one of the offsets made in `new`.
        let ptr = unsafe { self.whole.ptr.add(at) };
        let (home, touched) = (Home::Slabs(self.clone()), AtomicUsize::new(0));
        let raw = RawBlock { ptr, cap: self.size, home, touched, kept: 0, writer: 0 };
        Some(Buf { block: Share::new(raw, Weak::new()), start: 0, len: 0 })
    }

    /// Blocks that nobody has.
    pub fn left(&self) -> usize {
        self.free().len()
    }

    /// Bytes of one block.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Address of the mapping, and its bytes.
    pub fn span(&self) -> (usize, usize) {
        (self.whole.ptr.as_ptr().addr(), self.whole.cap)
    }

    /// Address and bytes of all blocks up to number `count`, from number `from` on.
    pub fn part(&self, from: usize, count: usize) -> (usize, usize) {
        let end = count.saturating_mul(self.size).min(self.whole.cap);
        let start = from.saturating_mul(self.size).min(end);
        (self.whole.ptr.as_ptr().addr() + start, end - start)
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A piece of memory. `cap` 0 means none.
pub(super) struct RawBlock {
    pub(super) ptr: NonNull<u8>,
    pub(super) cap: usize,
    pub(super) home: Home,
    /// End of what may have been written since the block was taken from the idle ones: above it there are no pages, except up to
    /// `kept`.
    pub(super) touched: AtomicUsize,
    /// The same for the time before.
    pub(super) kept: usize,
    /// Whose bytes an idle block of Reply chunks may hold: the number of a connection, or 0 for nobody's.
    pub(super) writer: u64,
}

/// Whose memory a block is.
pub(super) enum Home {
    /// An anonymous mapping of the block's own.
    Mapping,
    /// A part of a mapping that outlives it. It is in no pool.
    Slabs(Arc<Slabs>),
    /// The outbox of a segment that a peer maps too. It is in no pool.
    Outbox(Arc<Own>),
    /// Not ours to unmap, trim or move. Such a block is in no pool and never a Buf.
    Program,
}

// SAFETY: a RawBlock owns its mapping, or its part of one, or its lender promised that any thread may use it; the pointer is
// used through Buf (exclusive), Region (read only) and Sink (raw copies by one device at a time under the connection's lock),
// never shared without them.
unsafe impl Send for RawBlock {}
// SAFETY: as above; `&RawBlock` gives no access to the bytes outside those three types.
unsafe impl Sync for RawBlock {}

impl RawBlock {
    pub(super) const fn empty() -> RawBlock {
        RawBlock {
            ptr: NonNull::dangling(),
            cap: 0,
            home: Home::Mapping,
            touched: AtomicUsize::new(0),
            kept: 0,
            writer: 0,
        }
    }

    pub(super) fn map(cap: usize) -> io::Result<RawBlock> {
        reserve::check()?;
        #[cfg(test)]
        ration::take()?;
        let ptr = mapped_beside_idle(|| pages::map(cap))?;
        #[cfg(test)]
        ration::count(cap as isize);
        Ok(RawBlock { ptr, cap, home: Home::Mapping, touched: AtomicUsize::new(0), kept: 0, writer: 0 })
    }

    /// The outbox of `own`, if it is free.
    pub(super) fn outbox(own: &Arc<Own>) -> Option<RawBlock> {
        let (ptr, cap) = own.take_outbox()?;
        let (home, touched) = (Home::Outbox(own.clone()), AtomicUsize::new(0));
        Some(RawBlock { ptr, cap, home, touched, kept: 0, writer: 0 })
    }

    pub(super) fn is_lent(&self) -> bool {
        matches!(self.home, Home::Program)
    }

    pub(super) fn grow(&mut self, cap: usize) -> io::Result<()> {
        reserve::check()?;
        #[cfg(test)]
        ration::take()?;
        if let Home::Slabs(_) | Home::Outbox(_) = self.home {
            let fresh = RawBlock::map(cap)?;
            let used = *self.touched.get_mut();
            // SAFETY: `used <= self.cap < cap`; both blocks are ours and distinct, and `&mut self` means that nobody else writes
            // either.
            unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr(), fresh.ptr.as_ptr(), used) };
            fresh.touch(used);
            *self = fresh;
            return Ok(());
        }
        let (ptr, old) = (self.ptr, self.cap);
        // SAFETY: `ptr, old` is our own whole mapping, which a failed attempt leaves as it is, and `&mut self` means that nobody
        // points into it.
        self.ptr = mapped_beside_idle(|| unsafe { pages::grow(ptr, old, cap) })?;
        #[cfg(test)]
        ration::count(cap as isize - self.cap as isize);
        self.cap = cap;
        Ok(())
    }

    /// Notes that bytes up to `end` may have been written.
    pub(super) fn touch(&self, end: usize) {
        if end > self.touched.load(Relaxed) {
            self.touched.fetch_max(end, Relaxed);
        }
    }

    /// Bytes that may have pages.
    fn pages(&self) -> usize {
        self.touched.load(Relaxed).max(self.kept)
    }

    /// Zeroes all that may have been written.
    fn scrub(&mut self) {
        let used = self.pages().min(self.cap);
        (*self.touched.get_mut(), self.kept) = (0, 0);
        // SAFETY: `used <= cap`: the range is the lower part of our own mapping, which nobody else points into.
        unsafe { std::ptr::write_bytes(self.ptr.as_ptr(), 0, used) };
    }

    /// Gives the pages above `warm` back to the system.
    pub(super) fn trim(&mut self, warm: usize) {
        // What others keep need not be whole pages, and the kernel takes back whole pages or nothing.
        let warm = round_up(warm);
        if self.pages() > warm && self.cap > warm {
            // SAFETY: `warm < cap`: the range is the upper part of our own mapping, which nobody points into.
            let upper = unsafe { self.ptr.as_ptr().add(warm) };
            // SAFETY: as above; MADV_DONTNEED on anonymous memory only drops its contents.
            unsafe { libc::madvise(upper.cast(), self.cap - warm, libc::MADV_DONTNEED) };
            *self.touched.get_mut() = warm.min(*self.touched.get_mut());
            self.kept = warm.min(self.kept);
        }
    }
}

impl Drop for RawBlock {
    fn drop(&mut self) {
        match &self.home {
            // SAFETY: `ptr, cap` is our own whole mapping, and its last holder is going.
            Home::Mapping if self.cap != 0 => unsafe {
                pages::unmap(self.ptr, self.cap);
                #[cfg(test)]
                ration::count(-(self.cap as isize));
            },
            Home::Slabs(slabs) => slabs.free().push(self.ptr.addr().get() - slabs.whole.ptr.addr().get()),
            Home::Outbox(own) => own.give_back(),
            Home::Mapping | Home::Program => {}
        }
    }
}

/// Anonymous private mappings, which read as zero.
#[cfg(not(fuzzing))]
mod pages {
    use std::io;
    use std::ptr::{NonNull, null_mut};

    pub fn map(cap: usize) -> io::Result<NonNull<u8>> {
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing memory.
        mapped(unsafe { libc::mmap(null_mut(), cap, access, kind, -1, 0) })
    }

    /// # Safety
    /// `ptr` and `old` are a whole mapping, into which nobody points.
    pub unsafe fn grow(ptr: NonNull<u8>, old: usize, new: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: by contract.
        mapped(unsafe { libc::mremap(ptr.as_ptr().cast(), old, new, libc::MREMAP_MAYMOVE) })
    }

    /// # Safety
    /// As for `grow`.
    pub unsafe fn unmap(ptr: NonNull<u8>, cap: usize) {
        // SAFETY: by contract.
        unsafe { libc::munmap(ptr.as_ptr().cast(), cap) };
    }

    fn mapped(ptr: *mut libc::c_void) -> io::Result<NonNull<u8>> {
        if ptr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(ptr.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }
}

/// Blocks of the heap, whose ends AddressSanitizer watches.
#[cfg(fuzzing)]
mod pages {
    use std::alloc::{self, Layout};
    use std::io;
    use std::ptr::NonNull;

    fn layout(cap: usize) -> io::Result<Layout> {
        Layout::from_size_align(cap, super::PAGE).map_err(io::Error::other)
    }

    pub fn map(cap: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: no block of memory is empty.
        let ptr = unsafe { alloc::alloc_zeroed(layout(cap)?) };
        NonNull::new(ptr).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// # Safety
    /// `ptr` and `old` are a whole block, into which nobody points.
    pub unsafe fn grow(ptr: NonNull<u8>, old: usize, new: usize) -> io::Result<NonNull<u8>> {
        let fresh = map(new)?;
        // SAFETY: two blocks of at least that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(ptr.as_ptr(), fresh.as_ptr(), old.min(new)) };
        // SAFETY: by contract.
        unsafe { unmap(ptr, old) };
        Ok(fresh)
    }

    /// # Safety
    /// As for `grow`.
    pub unsafe fn unmap(ptr: NonNull<u8>, cap: usize) {
        // SAFETY: by contract it was made with this layout.
        unsafe { alloc::dealloc(ptr.as_ptr(), layout(cap).expect("that of `map`")) };
    }
}

pub(super) fn round_up(n: usize) -> usize {
    n.next_multiple_of(PAGE)
}

/// For tests: how much is mapped for blocks in this thread, and memory that runs out.
#[cfg(test)]
pub(crate) mod ration {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static MAPPED: Cell<isize> = const { Cell::new(0) };
        static LEFT: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
    }

    /// Bytes of blocks that this thread has mapped, less those that it has unmapped.
    pub(crate) fn mapped() -> isize {
        MAPPED.get()
    }

    /// From here on `left.0` requests of this thread for memory succeed, and then `left.1` fail.
    pub(crate) fn fail_after(left: Option<(usize, usize)>) {
        LEFT.set(left);
    }

    /// Nothing fails until what this returns is given to `fail_after`.
    pub(crate) fn pause() -> Option<(usize, usize)> {
        LEFT.take()
    }

    pub(super) fn count(bytes: isize) {
        MAPPED.set(MAPPED.get() + bytes);
    }

    pub(super) fn take() -> io::Result<()> {
        match LEFT.get() {
            None => return Ok(()),
            Some((0, 0)) => LEFT.set(None),
            Some((0, fail)) => {
                LEFT.set(Some((0, fail - 1)));
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            Some((left, fail)) => LEFT.set(Some((left - 1, fail))),
        }
        Ok(())
    }
}
