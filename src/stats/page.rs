//! The page that others may watch: a file in memory with a name of ours, which is found among the descriptors of this process.
//!
//! It comes with the first connection and goes with the process. The kernel lets those open it who may look into this process. It
//! can neither shrink, which would be a SIGBUS here, nor be written by anybody else. Where it cannot be made, the counters stay
//! where they are, and nobody is told.
//!
//! After fork(2) the child has neither descriptor nor page: private memory lies in its place, for whatever holds references to
//! it. It makes a page of its own with its first connection or call.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};
use std::time::SystemTime;

use rustix::fs::{Mode, SealFlags, fchmod, fcntl_add_seals, fstat};

use super::layout::{
    self, COUNTER_ROOM, HEAD_WORDS, HISTOGRAM_WORDS, HISTOGRAMS, Head, MAGIC, NAME, SIZE, SLOT_WORDS, SLOTS,
    VERSION,
};
use super::{COUNT, TABLE, Table};
use crate::process;

/// The page, all of it atomic words: whoever else writes to it changes numbers and nothing more.
#[repr(C)]
pub struct Page {
    head: [AtomicU64; HEAD_WORDS],
    counters: Table,
    spare: [AtomicU64; COUNTER_ROOM - COUNT],
    slots: [[AtomicU64; SLOT_WORDS]; SLOTS],
    histograms: [[AtomicU64; HISTOGRAM_WORDS]; HISTOGRAMS],
}

const _: () = assert!(size_of::<Page>() <= SIZE);

impl Page {
    /// A word of the header.
    pub fn head(&self, word: Head) -> &AtomicU64 {
        &self.head[word as usize]
    }

    /// The words of a connection.
    #[inline]
    pub fn slot(&self, at: usize) -> &[AtomicU64; SLOT_WORDS] {
        &self.slots[at]
    }

    /// The words of a histogram.
    #[inline]
    pub fn histogram(&self, at: usize) -> &[AtomicU64; HISTOGRAM_WORDS] {
        &self.histograms[at]
    }

    /// Writes the header. The magic number comes last.
    fn introduce(&self) {
        let put = |word: Head, n: u64| self.head(word).store(n, Relaxed);
        let text = |from: Head, words: &[u64]| {
            for (place, word) in self.head[from as usize..].iter().zip(words) {
                place.store(*word, Relaxed);
            }
        };
        put(Head::Version, VERSION);
        put(Head::Size, SIZE as u64);
        put(Head::Counters, std::mem::offset_of!(Page, counters) as u64);
        put(Head::CounterCount, COUNT as u64);
        put(Head::Slots, std::mem::offset_of!(Page, slots) as u64);
        put(Head::SlotSize, 8 * SLOT_WORDS as u64);
        put(Head::SlotCount, SLOTS as u64);
        put(Head::Histograms, std::mem::offset_of!(Page, histograms) as u64);
        put(Head::HistogramSize, 8 * HISTOGRAM_WORDS as u64);
        put(Head::HistogramCount, HISTOGRAMS as u64);
        put(Head::Pid, std::process::id().into());
        put(Head::Since, now());
        text(Head::Library, &layout::text::<4>(env!("CARGO_PKG_VERSION")));
        let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        text(Head::Program, &layout::text::<8>(name.trim_end()));
        // For all calls without a histogram of their own.
        self.histogram(0)[0].store(1, Relaxed);
        self.head(Head::Magic).store(MAGIC, Release);
    }
}

/// Where the counters are: [`TABLE`], or in the page. Never null.
static COUNTERS: AtomicPtr<Table> = AtomicPtr::new((&raw const TABLE).cast_mut());

/// The page, if there is one.
static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());

/// Changes when what was known about the page no longer holds: twice the number of processes on the way from the first one to
/// this one (from 1 on), plus 1 once there is a page.
static EPOCH: AtomicU64 = AtomicU64::new(2);

/// Whether somebody makes the page, or has tried to, in this process.
static STATE: AtomicI32 = AtomicI32::new(NOT_TRIED);
const NOT_TRIED: i32 = 0;
const TRIED: i32 = 1;

/// The descriptor, and what it refers to.
static FILE: AtomicI32 = AtomicI32::new(-1);
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Where to count.
#[inline]
pub(super) fn counters() -> &'static Table {
    let table = COUNTERS.load(Acquire);
    // SAFETY: `TABLE`, or the table of a page, which is never unmapped (see `forked`); all atomic words.
    unsafe { &*table }
}

/// The counters in the page, if they are there.
pub(super) fn moved_counters() -> Option<&'static Table> {
    page().map(|page| &page.counters)
}

/// The page, if there is one.
#[inline]
pub(super) fn page() -> Option<&'static Page> {
    let page = PAGE.load(Acquire);
    // SAFETY: NULL, or a page, which is never unmapped (see `forked`); all atomic words.
    unsafe { page.as_ref() }
}

/// Whether there is a page, so that it makes sense to ask what time it is.
#[inline]
pub fn is_watched() -> bool {
    !PAGE.load(Relaxed).is_null()
}

/// Changes when a page is made, and in a forked child.
#[inline]
pub(super) fn epoch() -> u64 {
    EPOCH.load(Relaxed)
}

/// Whether this is an epoch of this process.
pub(super) fn is_own(epoch: u64) -> bool {
    epoch | 1 == self::epoch() | 1
}

/// Nanoseconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// Makes the page, if this process has not tried that yet.
pub fn begin() {
    if STATE.load(Relaxed) != NOT_TRIED || STATE.swap(TRIED, AcqRel) != NOT_TRIED {
        return;
    }
    // The program goes on without it: there may be no descriptor left, or the system has no such files.
    let Ok((page, file)) = process::keeping_errno(make) else { return };
    let identity = process::identify(file.as_raw_fd());
    if let Some(identity) = identity {
        DEVICE.store(identity.device, Relaxed);
        INODE.store(identity.inode, Relaxed);
        FILE.store(std::os::fd::IntoRawFd::into_raw_fd(file), Relaxed);
    }
    // SAFETY: a mapping of enough bytes that was just made and is never unmapped; all zeros are a page.
    let page = unsafe { page.as_ref() };
    page.introduce();
    PAGE.store(std::ptr::from_ref(page).cast_mut(), Release);
    COUNTERS.store((&raw const page.counters).cast_mut(), Release);
    // What others count meanwhile is in one of the two tables, and never lost: see `snapshot`.
    for (from, to) in TABLE.iter().zip(&page.counters) {
        to.fetch_add(from.swap(0, Relaxed), Relaxed);
    }
    EPOCH.fetch_or(1, Relaxed);
}

fn make() -> io::Result<(NonNull<Page>, OwnedFd)> {
    let file = process::out_of_the_way(process::file_in_memory(NAME, SIZE)?)?;
    let page = map(Some(file.as_fd()), null_mut())?;
    // Readable by whoever may look into this process.
    fchmod(&file, Mode::RUSR)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    // Linux before 5.1 does not know the second.
    if fcntl_add_seals(&file, seals | SealFlags::FUTURE_WRITE | SealFlags::SEAL).is_err() {
        fcntl_add_seals(&file, seals | SealFlags::SEAL)?;
    }
    Ok((page, file))
}

/// Maps the file, or private memory, at an address of the kernel's choice or in the place of what is at `place`.
fn map(file: Option<BorrowedFd<'_>>, place: *mut Page) -> io::Result<NonNull<Page>> {
    let flags = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    };
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    let fd = file.map_or(-1, |file| file.as_raw_fd());
    // SAFETY: `place` is NULL, or a page of ours, of which there are only references to atomic words: what is mapped there has
    // the same words.
    let base =
        unsafe { libc::mmap(place.cast(), SIZE, libc::PROT_READ | libc::PROT_WRITE, flags | fixed, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Called in a forked child, which has only one thread: the page stays its parent's. Uses only what may be called there: system
/// calls and atomic words.
pub fn forked() {
    EPOCH.store((EPOCH.load(Relaxed) | 1) + 1, Relaxed);
    STATE.store(NOT_TRIED, Relaxed);
    let page = PAGE.swap(null_mut(), AcqRel);
    COUNTERS.store((&raw const TABLE).cast_mut(), Release);
    // SAFETY: NULL, or a page, which is never unmapped.
    let Some(parents) = (unsafe { page.as_ref() }) else { return };
    for (to, from) in TABLE.iter().zip(&parents.counters) {
        to.fetch_add(from.load(Relaxed), Relaxed);
    }
    // If a signal handler forked, what it interrupted may go on counting there, and inherited connections do. Where there is no
    // memory for that, the parent's figures are wrong by that much.
    let _ = process::keeping_errno(|| map(None, page));
    let file = FILE.swap(-1, Relaxed);
    // The program may have closed it, and the number may now be that of another file.
    let is_ours = process::borrow(file)
        .and_then(|file| Ok(fstat(file)?))
        .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (DEVICE.load(Relaxed), INODE.load(Relaxed)));
    if is_ours {
        // SAFETY: a descriptor of ours, which nothing else knows of.
        drop(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(file) });
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::ftruncate;
    use rustix::io::Errno;

    use super::*;
    use crate::stats::layout::Slot;
    use crate::stats::{Connection, Counter, Facts, Names, Procedure, Recent, add, snapshot};

    /// The words of the page as another process reads them.
    fn read() -> Vec<u64> {
        let link = format!("/proc/self/fd/{}", FILE.load(Relaxed));
        let target = std::fs::read_link(&link).unwrap();
        assert_eq!(target.to_str().unwrap(), format!("/memfd:{NAME} (deleted)"));
        let bytes = std::fs::read(&link).unwrap();
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    fn facts() -> Facts {
        let peer = Some("192.0.2.1:20049".parse().unwrap());
        Facts { accepted: true, fd: 77, device: "a device".to_owned(), peer, local: None }
    }

    /// The calls of each connection that is there, by `facts`.
    fn shown(words: &[u64]) -> Vec<u64> {
        let start = words[Head::Slots as usize] as usize / 8;
        let slots = words[start..][..SLOTS * SLOT_WORDS].chunks_exact(SLOT_WORDS);
        let here = slots.filter(|slot| slot[Slot::End as usize] == 2 && slot[Slot::Fd as usize] == 77);
        here.map(|slot| slot[Slot::Calls as usize]).collect()
    }

    /// One test only: the page is the process's. Other tests of this process count too, so only lower bounds hold.
    #[test]
    fn the_page_shows_what_is_counted_and_a_forked_child_has_one_of_its_own() {
        crate::fork::generation();
        add(Counter::Orphans, 1 << 40);
        begin();
        let words = read();
        assert_eq!((words.len() * 8, words[0]), (SIZE, MAGIC));
        let counters = words[Head::Counters as usize] as usize / 8;
        assert!(
            words[counters + Counter::Orphans as usize] >= 1 << 40,
            "what was counted before has moved there"
        );
        add(Counter::Orphans, 1);
        assert!(read()[counters + Counter::Orphans as usize] > 1 << 40);
        assert!(snapshot()[Counter::Orphans as usize] > 1 << 40);

        let mut connection = Connection::default();
        assert!(connection.is_stale());
        connection.show(facts);
        connection.add(Slot::Calls, 3);
        assert_eq!((connection.is_stale(), shown(&read())), (false, vec![3]));

        // Its file can neither be written nor cut.
        let link = format!("/proc/self/fd/{}", FILE.load(Relaxed));
        let file = process::borrow(FILE.load(Relaxed)).unwrap();
        assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(rustix::io::write(file, b"x"), Err(Errno::PERM));
        assert!(
            std::fs::File::options().write(true).open(&link).is_err() || rustix::process::geteuid().is_root()
        );

        // SAFETY: the child calls nothing but what this module may call there, and _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = !is_watched() && FILE.load(Relaxed) == -1;
            let goes_on = snapshot()[Counter::Orphans as usize] > 1 << 40;
            // In the inherited place, which nobody sees any more, and in the counters of this process.
            connection.add(Slot::Calls, 1 << 50);
            add(Counter::Orphans, 1 << 50);
            let stale = connection.is_stale();
            drop(connection);
            // SAFETY: ends this process and nothing else.
            unsafe { libc::_exit(if none && goes_on && stale { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: `status` is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child has no page, and its parent's figures");
        let words = read();
        assert_eq!(shown(&words), [3], "the child has neither counted there nor taken it away");
        assert!(words[counters + Counter::Orphans as usize] < 1 << 50);

        let call = [7, 0, 2, 100_003, 3, 6].map(u32::to_be_bytes).concat();
        let (names, mut recent) = (Names::of(&call), Recent::default());
        let procedure = names.procedure(true);
        // What a peer invents gets no histogram of its own.
        recent.served(names, || false).unwrap().took_since(0);
        let owners = |words: &[u64]| {
            let start = words[Head::Histograms as usize] as usize / 8;
            let all = words[start..][..HISTOGRAMS * HISTOGRAM_WORDS].chunks_exact(HISTOGRAM_WORDS);
            all.filter(|words| Procedure::of_word(words[0]) == Some(procedure)).count()
        };
        assert_eq!(owners(&read()), 0);
        recent.served(names, || true).unwrap().took_since(0);
        assert_eq!(owners(&read()), 1);
        recent.served(names, || panic!("it has one")).unwrap().took_since(0);
        let calls = |words: &[u64]| {
            let start = words[Head::Histograms as usize] as usize / 8;
            let mut all = words[start..][..HISTOGRAMS * HISTOGRAM_WORDS].chunks_exact(HISTOGRAM_WORDS);
            let own = all.find(|words| Procedure::of_word(words[0]) == Some(procedure)).unwrap();
            own[layout::HISTOGRAM_HEAD..].iter().sum::<u64>()
        };
        assert_eq!(calls(&read()), 2);
        // Other names are another procedure's.
        let other = Names::of(&[7, 0, 2, 100_003, 3, 7].map(u32::to_be_bytes).concat());
        recent.served(other, || true).unwrap().took_since(0);
        assert_eq!((calls(&read()), owners(&read())), (2, 1));
        recent.served(names, || panic!("it still has one")).unwrap();
        // A child has no page yet, though its parent's was the last.
        // SAFETY: as above.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = recent.served(names, || true).is_none();
            // SAFETY: as above.
            unsafe { libc::_exit(if none { 0 } else { 1 }) };
        }
        // SAFETY: `status` is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child does not count in its parent's place");

        drop(connection);
        assert!(shown(&read()).is_empty());

        // Connections for which there is no place are counted.
        let mut all = Vec::new();
        for _ in 0..=SLOTS {
            let mut connection = Connection::default();
            connection.show(|| Facts { fd: 78, ..facts() });
            all.push(connection);
        }
        assert!(read()[Head::WithoutSlot as usize] >= 1);
        all.iter().for_each(|connection| connection.add(Slot::Calls, 1));
    }
}
