//! References to pages of shared memory, for which the kernel leaves them where they are.
//!
//! Whoever has a file in memory can have the kernel make huge pages of it (`MADV_COLLAPSE`, Linux 6.1), whatever the system's
//! settings say of huge pages. The kernel then goes through all mappings of each page, of which a peer can make tens of
//! thousands, and keeps the page locked meanwhile: a process that reads or writes it sleeps until that is over, SIGKILL or
//! not. With 8,000 mappings it slept for a second. But the kernel leaves alone what would become a huge page if one of
//! the pages has a reference that is no mapping. The buffer of a pipe is one, for which nobody needs a right. So the first page of
//! each huge page goes into a pipe that nobody reads.
//!
//! One pipe serves some connections, since it costs descriptors. What has gone into it stays there, a page each, until the last of
//! these connections has ended: few enough, so that clients that come and go beside one that stays take hardly more
//! memory than that one's connection. The kernel counts the pages that all pipes of a user may hold, and gives the user's
//! other programs short ones when that is used up: so those of a process hold half of that at most.
//!
//! # Invariants
//! - Nothing is written to a pipe that has lost its other end, which the program may have closed.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use rustix::io::{Errno, pwrite};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};

use crate::fork;
use crate::process::{self, Kept};

/// Bytes of a huge page, at most, where pages have 4 KiB.
const HUGE: usize = 2 << 20;

/// Bytes for which a pipe has buffers, a page each, once more than one connection uses it.
const BUFFERS: usize = 256 << 10;

/// The most bytes for which all pipes of the process have buffers: half of what the kernel allows a user whose processes have no
/// privilege, as a rule (pipe-user-pages-soft in proc(5)).
const MOST: usize = 32 << 20;

/// For how many they have, in this process and the ones that it was forked from.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// How many pipes there are, likewise.
static PIPES: AtomicUsize = AtomicUsize::new(0);

/// How many descriptors the process has for pins.
pub fn descriptors() -> usize {
    let pipes = PIPES.load(Relaxed);
    // The other end of the latest one, too.
    pipes + pipes.min(1)
}

/// References to the pages of some files.
#[derive(Clone)]
pub struct Pins {
    _pipe: Arc<Pipe>,
}

/// The end of a pipe that connections have.
struct Pipe {
    read: Kept,
    buffers: AtomicUsize,
}

/// The latest pipe.
struct Latest {
    pipe: Weak<Pipe>,
    write: Kept,
    generation: u64,
}

static LATEST: fork::Lock<Option<Latest>> = fork::Lock::new();

/// References to these files of `bytes` bytes each, from their beginning to their end. No page of them is mapped or passed yet.
///
/// # Errors
/// `EAGAIN` where the process or the system gives pipes no more buffers; else the errno of what it refuses.
pub fn hold(files: &[OwnedFd], bytes: usize) -> io::Result<Pins> {
    let pages = || files.iter().flat_map(|file| (0..bytes as u64).step_by(HUGE).map(move |at| (file, at)));
    // A hole has no page.
    for (file, at) in pages() {
        process::quietly(|| pwrite(file, &[0], at).map_err(Errno::raw_os_error))
            .map_err(io::Error::from_raw_os_error)?;
    }
    let mut latest = LATEST.lock();
    if let Some(Latest { pipe, write, generation }) = &*latest
        && *generation == fork::generation()
        && let Some(pipe) = pipe.upgrade()
        && let (Some(_), Some(write)) = (pipe.read.get(), write.get())
        && pages().try_for_each(|(file, at)| pipe.refer(file, at, write)).is_ok()
    {
        return Ok(Pins { _pipe: pipe });
    }
    let (pipe, write) = Pipe::new()?;
    pages().try_for_each(|(file, at)| pipe.refer(file, at, write.get().ok_or(Errno::BADF)?))?;
    let pipe = Arc::new(pipe);
    *latest = Some(Latest { pipe: Arc::downgrade(&pipe), write, generation: fork::generation() });
    Ok(Pins { _pipe: pipe })
}

/// Counts more buffers, if the process may have them.
fn may_take(bytes: usize) -> bool {
    let most = if process::may_exceed_limits() { usize::MAX } else { MOST };
    let add = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= most);
    TAKEN.fetch_update(Relaxed, Relaxed, add).is_ok()
}

impl Pipe {
    /// A pipe, and its other end.
    fn new() -> io::Result<(Pipe, Kept)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let (buffers, read, write) = (fcntl_getpipe_size(&write)?, Kept::new(read)?, Kept::new(write)?);
        if !may_take(buffers) {
            return Err(Errno::AGAIN.into());
        }
        // From here on Drop counts it.
        PIPES.fetch_add(1, Relaxed);
        Ok((Pipe { read, buffers: AtomicUsize::new(buffers) }, write))
    }

    /// Puts a reference to a page into it.
    fn refer(&self, file: &OwnedFd, at: u64, write: BorrowedFd<'_>) -> io::Result<()> {
        let put = || {
            let sent = splice(file, Some(&mut { at }), write, None, 1, SpliceFlags::NONBLOCK);
            sent.map_err(Errno::raw_os_error)
        };
        // A program may have closed the other end in this moment.
        let sent = match process::quietly(put) {
            Err(libc::EAGAIN) if self.grow(write) => process::quietly(put),
            sent => sent,
        };
        match sent.map_err(io::Error::from_raw_os_error)? {
            1 => Ok(()),
            _ => Err(Errno::IO.into()),
        }
    }

    /// Gets it more buffers, once.
    fn grow(&self, write: BorrowedFd<'_>) -> bool {
        let before = self.buffers.load(Relaxed);
        let Some(more) = BUFFERS.checked_sub(before).filter(|more| *more > 0 && may_take(*more)) else {
            return false;
        };
        let grown = fcntl_setpipe_size(write, BUFFERS).is_ok();
        if grown {
            self.buffers.store(BUFFERS, Relaxed);
        } else {
            TAKEN.fetch_sub(more, Relaxed);
        }
        grown
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        TAKEN.fetch_sub(*self.buffers.get_mut(), Relaxed);
        PIPES.fetch_sub(1, Relaxed);
    }
}
