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
//! memory than that one's connection.
//!
//! # Invariants
//! - Nothing is written to a pipe that has lost its other end, which the program may have closed: that would raise SIGPIPE.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::io::{Errno, pwrite};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::fork;
use crate::process::{self, Kept};

/// Bytes of a huge page, at most, where pages have 4 KiB.
const HUGE: usize = 2 << 20;

/// Bytes for which a pipe has buffers, one for each page of 4 KiB.
const BUFFERS: usize = 256 << 10;

/// References to the pages of some files.
#[derive(Clone)]
pub struct Pins {
    _pipe: Arc<Kept>,
}

/// The latest pipe.
struct Latest {
    /// Of the connections that use it.
    read: Weak<Kept>,
    write: Kept,
    generation: u64,
}

static LATEST: fork::Lock<Option<Latest>> = fork::Lock::new();

/// References to these files of `bytes` bytes each, from their beginning to their end. No page of them is mapped or passed yet.
///
/// # Errors
/// `EAGAIN` where the system gives pipes too few buffers; else the errno of what it refuses.
pub fn hold(files: &[OwnedFd], bytes: usize) -> io::Result<Pins> {
    // A hole has no page.
    let fill = |file, at| process::quietly(|| pwrite(file, &[0], at).map_err(Errno::raw_os_error));
    let pages = || files.iter().flat_map(|file| (0..bytes as u64).step_by(HUGE).map(move |at| (file, at)));
    for (file, at) in pages() {
        fill(file, at).map_err(io::Error::from_raw_os_error)?;
    }
    let put = |write: BorrowedFd<'_>| pages().try_for_each(|(file, at)| refer(file, at, write));
    let mut latest = LATEST.lock();
    if let Some(Latest { read, write, generation }) = &*latest
        && *generation == fork::generation()
        && let Some(pipe) = read.upgrade()
        && let (Some(_), Some(write)) = (pipe.get(), write.get())
        && put(write).is_ok()
    {
        return Ok(Pins { _pipe: pipe });
    }
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // With fewer it serves fewer connections.
    let _ = fcntl_setpipe_size(&write, BUFFERS);
    put(write.as_fd())?;
    let (pipe, write) = (Arc::new(Kept::new(read)?), Kept::new(write)?);
    *latest = Some(Latest { read: Arc::downgrade(&pipe), write, generation: fork::generation() });
    Ok(Pins { _pipe: pipe })
}

/// Puts a reference to a page into a pipe.
fn refer(file: &OwnedFd, at: u64, write: BorrowedFd<'_>) -> io::Result<()> {
    match splice(file, Some(&mut { at }), write, None, 1, SpliceFlags::NONBLOCK)? {
        1 => Ok(()),
        _ => Err(Errno::IO.into()),
    }
}
