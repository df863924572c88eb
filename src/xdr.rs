//! XDR streams: they run a C program's xdrproc over our memory.
//!
//! libtirpc hands a program's types over as procedures that walk an `XDR`, a struct with a table of
//! operations ([`XdrOps`], `rpc/xdr.h`). This file owns two such streams and nothing else: [`Encoder`]
//! appends to one contiguous, growing [`Buf`]; [`Decoder`] reads what a device has placed, in as many pieces as it came in. What
//! a message means, and when it is sent, belongs to the modules above.
//!
//! Stream position 0 is the XID, and no transport header lies in the stream: RPCSEC_GSS signs bytes 0 .. GETPOS, and an RFC 8166
//! Position counts from the same byte (§3.4.5). Each operation behaves as libtirpc's `xdrmem` does, including its oddities; where
//! `xdrmem` would read or write outside its memory, ours answers FALSE.
//!
//! Every item enters a message through `put_bytes`, the only place where it is known to be one item with an address of its own:
//! there it is copied or, if [`Encoder::lend`] allows it, left where it lies. The message then has a hole of its size, so that
//! positions stay what they are. A message ends at its position, not at the length of a buffer.
//!
//! # Invariants
//! - `Encoding`: `at <= high <= u32::MAX`; `base` points to the first byte of `buf`, and `room <= buf.len()`.
//! - `Encoding`: `lent` is sorted, its items do not overlap, and nothing has been put over them since.
//! - `Decoding`: `next .. next + left` lies inside the current source; `end - left` is the position.
//! - The heap object that `x_private` points into never moves and is reached through raw pointers only.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of, size_of};
use std::ptr::{self, NonNull};
use std::thread::LocalKey;

use crate::error::{Error, Kind};
use crate::ffi::guard;
use crate::memory::shared::Shown;
use crate::memory::{Buf, IoVecMut, Message, PassStage, Payload, Region, Regions};
use crate::per_thread::{self, Owned};

/// A program's `xdrproc_t`: encodes, decodes or frees (`x_op`) one object.
///
/// C declares it variadic because some of its procedures take a third argument, a maximum length. Nobody passes that argument:
/// libtirpc's own transports call with two arguments, and so do we. A procedure that reads a third (a bare `xdr_string`) finds
/// what it always found there, the leftovers of a register; `xdr_wrapstring` exists for it. On x86-64 a call with two pointers is
/// the same for a variadic and for a plain C function.
///
/// It may throw, and it may end its thread.
pub type XdrProc = Option<unsafe extern "C-unwind" fn(*mut XDR, *mut c_void) -> c_int>;

/// `enum xdr_op`: what a procedure is to do.
pub mod op {
    use std::ffi::c_int;

    /// Object to stream.
    pub const ENCODE: c_int = 0;
    /// Stream to object.
    pub const DECODE: c_int = 1;
    /// Release what decoding allocated; the stream is not touched.
    pub const FREE: c_int = 2;
}

/// `struct __rpc_xdr`: the handle that a procedure walks.
#[allow(missing_docs, clippy::upper_case_acronyms)]
#[derive(Debug)]
#[repr(C)]
pub struct XDR {
    pub x_op: c_int,
    pub x_ops: *const XdrOps,
    pub x_public: *mut c_char,
    pub x_private: *mut c_void,
    pub x_base: *mut c_void,
    pub x_handy: c_uint,
}

/// `struct xdr_ops`: the operations of one kind of stream. A NULL `destroy` or `control` is never called.
#[allow(missing_docs)]
#[derive(Debug)]
#[repr(C)]
pub struct XdrOps {
    pub getlong: unsafe extern "C" fn(*mut XDR, *mut c_long) -> c_int,
    pub putlong: unsafe extern "C" fn(*mut XDR, *const c_long) -> c_int,
    pub getbytes: unsafe extern "C" fn(*mut XDR, *mut c_char, c_uint) -> c_int,
    pub putbytes: unsafe extern "C" fn(*mut XDR, *const c_char, c_uint) -> c_int,
    pub getpostn: unsafe extern "C" fn(*mut XDR) -> c_uint,
    pub setpostn: unsafe extern "C" fn(*mut XDR, c_uint) -> c_int,
    pub inline: unsafe extern "C" fn(*mut XDR, c_uint) -> *mut i32,
    pub destroy: Option<unsafe extern "C" fn(*mut XDR)>,
    pub control: Option<unsafe extern "C" fn(*mut XDR, c_int, *mut c_void) -> c_int>,
}

const _: () = {
    assert!(size_of::<XDR>() == 48);
    assert!(offset_of!(XDR, x_op) == 0);
    assert!(offset_of!(XDR, x_ops) == 8);
    assert!(offset_of!(XDR, x_public) == 16);
    assert!(offset_of!(XDR, x_private) == 24);
    assert!(offset_of!(XDR, x_base) == 32);
    assert!(offset_of!(XDR, x_handy) == 40);
    assert!(size_of::<XdrOps>() == 72);
    assert!(offset_of!(XdrOps, getlong) == 0);
    assert!(offset_of!(XdrOps, putlong) == 8);
    assert!(offset_of!(XdrOps, getbytes) == 16);
    assert!(offset_of!(XdrOps, putbytes) == 24);
    assert!(offset_of!(XdrOps, getpostn) == 32);
    assert!(offset_of!(XdrOps, setpostn) == 40);
    assert!(offset_of!(XdrOps, inline) == 48);
    assert!(offset_of!(XdrOps, destroy) == 56);
    assert!(offset_of!(XdrOps, control) == 64);
    // The sum of a position and a C length is computed in usize without a check.
    assert!(size_of::<usize>() == 8);
};

/// `bool_t` of libtirpc: it worked.
const TRUE: c_int = 1;

/// It did not work, and nothing has changed.
const FALSE: c_int = 0;

/// Longest message: an XDR position is a `u_int`, and the sum of a position and its pad must remain one.
const MESSAGE_MAX: usize = u32::MAX as usize - 4096;

/// Bytes become writable in steps of this size: one page, the unit in which [`Buf`] accounts for its memory.
const STEP: usize = 4096;

/// The stream that a message is encoded into.
///
/// The message ends where the stream stands when it is finished, as a record of libtirpc's `xdrrec` does: a
/// procedure that goes back to fill in a length goes forward again afterwards.
pub struct Encoder {
    /// From `Stream::leak`, so that no move of the Encoder touches what C points to. Ended by `drop` or `finish`.
    stream: NonNull<Stream<Encoding>>,
}

impl Encoder {
    /// A stream that fills `buf` from its first byte, which is position 0; what `buf` holds is overwritten.
    pub fn new(mut buf: Buf) -> Encoder {
        buf.set_len(0);
        let base = buf.as_mut_ptr();
        let state = Encoding {
            buf,
            base,
            room: 0,
            at: 0,
            high: 0,
            limit: MESSAGE_MAX,
            copied: 0,
            failure: None,
            lending: None,
            lent: Vec::new(),
            lent_end: 0,
        };
        Encoder { stream: Stream::leak(op::ENCODE, &ENCODE, state) }
    }

    /// The C handle, set to encode. It is valid as long as the Encoder.
    pub fn xdr(&mut self) -> *mut XDR {
        Stream::xdr(self.stream, op::ENCODE)
    }

    /// Where the next byte goes.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn position(&self) -> usize {
        self.state().at
    }

    /// Bytes that were copied out of the program's memory: all that came through `x_putbytes`, pads included.
    pub fn copied(&self) -> u64 {
        self.state().copied
    }

    /// Puts whole XDR words, as an xdrproc does with `XDR_PUTBYTES`. Returns false without memory or over the limit.
    #[must_use]
    pub fn put(&mut self, words: &[u8]) -> bool {
        // SAFETY: the stream is alive until `drop`, and `&mut self` makes this the only reference to it.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        // SAFETY: `words` is readable for its length.
        (unsafe { state.put_bytes(words.as_ptr(), words.len()) }) == TRUE
    }

    /// Makes every put that would end beyond `bytes` fail. The default is just short of 4 GiB, as is the maximum.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn set_limit(&mut self, bytes: usize) {
        // SAFETY: the stream is alive until `drop`, and `&mut self` makes this the only reference to it.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        state.limit = bytes.min(MESSAGE_MAX);
        state.room = state.room.min(state.limit);
    }

    /// Leaves items in the program's memory from here on, as `lending` says.
    ///
    /// # Safety
    /// What an xdrproc puts, where `lending` chooses it, stays valid and unchanged until all loans of the finished message are
    /// over ([`Message::loans`]).
    pub unsafe fn lend(&mut self, lending: Lending) {
        // SAFETY: the stream is alive until `drop`, and `&mut self` makes this the only reference to it.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        state.lending = Some(lending);
    }

    /// What has been encoded so far, with holes where items are lent.
    pub fn encoded(&self) -> &[u8] {
        let state = self.state();
        &state.buf[..state.at.min(state.buf.len())]
    }

    /// The first item that was lent: its address and length.
    pub fn first_lent(&self) -> Option<(*const u8, usize)> {
        self.state().lent.first().map(|item| (item.from, item.len))
    }

    /// The encoded message.
    ///
    /// # Errors
    /// Why the first put that failed did so: `TooLong` over the limit, `Encode` without memory. A procedure that failed for a
    /// reason of its own leaves no error here: its FALSE says so.
    pub fn finish(self) -> Result<Message, Error> {
        let stream = self.stream;
        std::mem::forget(self);
        // SAFETY: `stream` came from `Stream::leak` in `new`, and `drop` does not run any more.
        let mut state = unsafe { Stream::end(stream) };
        // An item that the end of the message cuts off is a part of it only up to there.
        state.take_back(state.at, usize::MAX);
        let Encoding { mut buf, at, failure, lent, .. } = state;
        match failure {
            Some(error) => Err(error),
            None => {
                buf.set_len(at);
                if lent.is_empty() {
                    return Ok(buf.into());
                }
                let lent = lent
                    .into_iter()
                    // SAFETY: by the contract of `lend`.
                    .map(|item| (item.at, unsafe { Region::lend(item.from, item.len) }))
                    .collect();
                Ok(Message::new(buf, lent))
            }
        }
    }

    fn state(&self) -> &Encoding {
        // SAFETY: the stream is alive until `drop`; C code holds pointers to it but runs only inside calls
        // that take the Encoder as `&mut` (`xdr`), so nothing writes while this borrow lives.
        unsafe { &(*self.stream.as_ptr()).state }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        // SAFETY: `stream` came from `Stream::leak` in `new`, and has not ended: `finish` forgets the Encoder.
        drop(unsafe { Stream::end(self.stream) });
    }
}

// SAFETY: an Encoder owns all that its pointers point to; nothing is bound to the thread that made it.
unsafe impl Send for Encoder {}

/// Shorter items are always copied: credentials and verifiers, which have at most 400 bytes (RFC 5531 §8.2), are freed
/// right after they were put.
pub const LEND_MIN: usize = 401;

/// Which items an [`Encoder`] leaves in the program's memory.
pub struct Lending {
    /// Items of fewer bytes are copied.
    pub at_least: usize,
    /// Gets what is encoded so far, and address and length of the item that would follow. Returns whether to lend that item.
    #[allow(clippy::type_complexity)]
    pub which: Box<dyn Fn(&[u8], *const u8, usize) -> bool + Send>,
    /// The put of the first lent item fails: nothing that follows it is wanted.
    pub stop: bool,
}

/// The stream that a message is decoded from: the concatenation of its pieces.
pub struct Decoder {
    /// From `Stream::leak`, as in [`Encoder`].
    stream: NonNull<Stream<Decoding>>,
}

impl Decoder {
    /// A stream over the pieces of `payload`, in order, and over what follows them. It ends at 4 GiB, where XDR positions end.
    ///
    /// What the peer still has is taken when it is decoded, each byte once: from there on the stream can go back only within
    /// [`WINDOW`], like one of libtirpc's over a socket. It ends where the peer has taken the rest back.
    pub fn new(payload: impl Into<Payload>) -> Decoder {
        let Payload { pieces: sources, rest } = payload.into();
        let sum = sources.iter().fold(0usize, |sum, s| sum.saturating_add(s.len()));
        let rest =
            rest.map(|shown| Box::new(Rest { shown: *shown, begins: sum, window: Vec::new(), held: 0 }));
        let more = rest.as_ref().map_or(0, |rest| rest.shown.len());
        let mut state = Decoding {
            sources,
            base: 0,
            index: 0,
            end: 0,
            next: NonNull::dangling().as_ptr(),
            left: 0,
            total: sum.saturating_add(more).min(u32::MAX as usize),
            rest,
            copied: 0,
        };
        state.enter(0, 0);
        Decoder { stream: Stream::leak(op::DECODE, &DECODE, state) }
    }

    /// The C handle, set to decode at each call; the caller may set `x_op` to FREE. It is valid as long as
    /// the Decoder.
    pub fn xdr(&mut self) -> *mut XDR {
        Stream::xdr(self.stream, op::DECODE)
    }

    /// Where the next byte comes from.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn position(&self) -> usize {
        self.state().position()
    }

    /// Bytes from the position to the end.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn remaining(&self) -> usize {
        self.state().remaining()
    }

    /// Takes the next bytes, if they lie in one piece and are `wanted`. For a header that is nearly always the same.
    pub fn take_if<const N: usize>(&mut self, wanted: impl FnOnce(&[u8; N]) -> bool) -> bool {
        // SAFETY: as in `Encoder::put`.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        if state.left < N {
            return false;
        }
        // SAFETY: `left` bytes are readable from `next`, which the source keeps.
        let taken = wanted(unsafe { &*state.next.cast::<[u8; N]>() });
        if taken {
            state.next = state.next.wrapping_add(N);
            state.left -= N;
        }
        taken
    }

    /// Fetches what the peer still has, while the peer has a reason to keep it.
    pub fn fetch(&mut self) {
        // SAFETY: as in `Encoder::put`.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        if state.rest.is_some() && state.remaining() > 0 {
            state.fetch();
        }
    }

    /// Notes that the program has decoded what it wants. Returns whether that was pulled with a [`Pass`](crate::memory::Pass).
    pub fn end_pass(&self) -> bool {
        let mut pulled = false;
        for source in &self.state().sources {
            pulled |= source.reach(PassStage::Decoded);
        }
        pulled
    }

    /// Bytes that were copied into the program's memory: all that left through `x_getbytes`, pads included.
    pub fn copied(&self) -> u64 {
        self.state().copied
    }

    fn state(&self) -> &Decoding {
        // SAFETY: as in `Encoder::state`.
        unsafe { &(*self.stream.as_ptr()).state }
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: `stream` came from `Stream::leak` in `new`.
        drop(unsafe { Stream::end(self.stream) });
    }
}

// SAFETY: as for Encoder.
unsafe impl Send for Decoder {}

/// Runs `proc` over `object` to release what decoding allocated (`xdr_free`), on a stream without memory. Returns what
/// `proc` says.
///
/// # Safety
/// `proc` is NULL or a procedure for the type of `object`, and `object` is what it may free: decoded by it, or zeroed.
pub unsafe fn free(proc: XdrProc, object: *mut c_void) -> c_int {
    let Some(proc) = proc else { return 1 };
    let mut xdr = XDR {
        x_op: op::FREE,
        x_ops: &NOTHING,
        x_public: ptr::null_mut(),
        x_private: ptr::null_mut(),
        x_base: ptr::null_mut(),
        x_handy: 0,
    };
    // SAFETY: the caller's contract; `xdr` lives across the call, and its operations refuse to do anything.
    unsafe { proc(&raw mut xdr, object) }
}

/// A C handle and what its operations work on. `x_private` points to `state`, and to nothing else.
struct Stream<S> {
    xdr: XDR,
    state: S,
}

/// What a thread keeps of its latest stream: the memory, for its next one, so that no call allocates it.
type Spare<S> = Owned<Box<MaybeUninit<Stream<S>>>>;

/// A kind of stream.
trait Kept: Sized + 'static {
    /// The thread's own.
    const SPARE: &'static LocalKey<Spare<Self>>;
}

thread_local! {
    static ENCODING: Spare<Encoding> = const { Owned::new() };
    static DECODING: Spare<Decoding> = const { Owned::new() };
}

impl Kept for Encoding {
    const SPARE: &'static LocalKey<Spare<Encoding>> = &ENCODING;
}

impl Kept for Decoding {
    const SPARE: &'static LocalKey<Spare<Decoding>> = &DECODING;
}

impl<S: Kept> Stream<S> {
    fn leak(x_op: c_int, x_ops: *const XdrOps, state: S) -> NonNull<Stream<S>> {
        let xdr = XDR {
            x_op,
            x_ops,
            x_public: ptr::null_mut(),
            x_private: ptr::null_mut(),
            x_base: ptr::null_mut(),
            x_handy: 0,
        };
        let memory = per_thread::take(S::SPARE).unwrap_or_else(Box::new_uninit);
        let stream = NonNull::from(Box::leak(Box::write(memory, Stream { xdr, state })));
        // SAFETY: the box was just leaked: alive, and known to nobody else. No reference is made.
        let state = unsafe { &raw mut (*stream.as_ptr()).state };
        // SAFETY: as above.
        unsafe { (*stream.as_ptr()).xdr.x_private = state.cast() };
        stream
    }

    /// Ends the stream; returns what it worked on.
    ///
    /// # Safety
    /// `stream` came from [`Stream::leak`], and is not used any more.
    unsafe fn end(stream: NonNull<Stream<S>>) -> S {
        // SAFETY: alive (contract). Nobody reads it again: its memory is uninitialised from here on.
        let Stream { state, .. } = unsafe { stream.as_ptr().read() };
        // SAFETY: from `Box::leak`, of this layout.
        let memory = unsafe { Box::from_raw(stream.as_ptr().cast::<MaybeUninit<Stream<S>>>()) };
        // Kept by this thread, whichever thread made it.
        let _ = per_thread::put(S::SPARE, memory);
        state
    }

    fn xdr(stream: NonNull<Stream<S>>, x_op: c_int) -> *mut XDR {
        // SAFETY: the owner calls with its live stream. No reference is made, so pointers that C holds stay
        // valid.
        let xdr = unsafe { &raw mut (*stream.as_ptr()).xdr };
        // SAFETY: as above; the field is written while no C code runs.
        unsafe { (*xdr).x_op = x_op };
        xdr
    }
}

/// State of an [`Encoder`].
struct Encoding {
    buf: Buf,
    /// First byte of `buf`; refreshed whenever `buf` may have moved.
    base: *mut u8,
    /// Bytes of `buf` that may be written at once: within `buf.len()` and the limit.
    room: usize,
    /// The position.
    at: usize,
    /// End of what was ever encoded: the stream may go back to positions up to here.
    high: usize,
    limit: usize,
    copied: u64,
    /// The first put that failed.
    failure: Option<Error>,
    lending: Option<Lending>,
    lent: Vec<Lent>,
    /// Where the last lent item ends; 0 without any.
    lent_end: usize,
}

/// An item left in the program's memory.
struct Lent {
    at: usize,
    len: usize,
    from: *const u8,
}

impl Encoding {
    /// Takes `n` bytes from the position on. The caller must write them.
    #[inline]
    fn take(&mut self, n: usize) -> Result<*mut u8, Error> {
        let end = self.at + n;
        if end > self.room {
            self.make_room(end)?;
        }
        if self.at < self.lent_end {
            self.take_back(self.at, end);
        }
        // SAFETY: `at <= end <= room <= buf.len()`: inside the block.
        let to = unsafe { self.base.add(self.at) };
        self.at = end;
        self.high = self.high.max(end);
        Ok(to)
    }

    #[cold]
    fn make_room(&mut self, end: usize) -> Result<(), Error> {
        if end > self.limit {
            let text = format!("the message is longer than its limit of {} bytes", self.limit);
            return Err(Error::new(Kind::TooLong, text));
        }
        self.buf
            .reserve(end)
            .map_err(|e| Error::new(Kind::Encode, format!("no memory for a message of {end} bytes: {e}")))?;
        self.buf.set_len(end.next_multiple_of(STEP).min(self.buf.capacity()));
        // INVARIANT: `base` and `room` describe the block as it is now.
        self.base = self.buf.as_mut_ptr();
        self.room = self.buf.len().min(self.limit);
        Ok(())
    }

    /// Copies the lent items that `from .. to` touches into the message after all: something else is put over them.
    #[cold]
    fn take_back(&mut self, from: usize, to: usize) {
        let (base, copied) = (self.base, &mut self.copied);
        self.lent.retain(|item| {
            let stays = item.at + item.len <= from || item.at >= to;
            if !stays {
                // SAFETY: the hole was taken when the item was lent: inside the block.
                let hole = unsafe { base.add(item.at) };
                // SAFETY: the item is readable while it is lent (`Encoder::lend`), and lies in the program's memory.
                unsafe { ptr::copy(item.from, hole, item.len) };
                *copied += item.len as u64;
            }
            stays
        });
        self.lent_end = self.lent.last().map_or(0, |item| item.at + item.len);
    }

    /// Leaves an item where it lies, if that is allowed. `None`: it must be copied.
    fn try_lend(&mut self, from: *const u8, n: usize) -> Option<c_int> {
        let lending = self.lending.as_ref().filter(|lending| n >= lending.at_least)?;
        if self.at < self.lent_end || !(lending.which)(&self.buf[..self.at], from, n) {
            return None;
        }
        let stop = lending.stop;
        let at = self.at;
        if let Err(error) = self.take(n) {
            return Some(self.fail(error));
        }
        self.lent.push(Lent { at, len: n, from });
        self.lent_end = at + n;
        Some(if stop { FALSE } else { TRUE })
    }

    fn fail(&mut self, error: Error) -> c_int {
        self.failure.get_or_insert(error);
        FALSE
    }

    #[inline]
    fn put_long(&mut self, value: c_long) -> c_int {
        match self.take(4) {
            Ok(to) => {
                // The low 32 bits: callers extend by sign, by zero, or pass more (`xdr_long`).
                // SAFETY: `to` has 4 writable bytes (`take`); an array of bytes needs no alignment.
                unsafe { to.cast::<[u8; 4]>().write((value as u32).to_be_bytes()) };
                TRUE
            }
            Err(error) => self.fail(error),
        }
    }

    /// # Safety
    /// `from` is readable for `n` bytes.
    #[inline]
    unsafe fn put_bytes(&mut self, from: *const u8, n: usize) -> c_int {
        if n == 0 {
            return TRUE;
        }
        if from.is_null() {
            return self.fail(Error::new(Kind::Encode, "an xdrproc passed NULL for data that is not empty"));
        }
        if self.lending.is_some()
            && let Some(done) = self.try_lend(from, n)
        {
            return done;
        }
        match self.take(n) {
            Ok(to) => {
                // SAFETY: `from` by contract, `to` has `n` writable bytes (`take`). The ranges may overlap: a
                // program may put what it got from XDR_INLINE.
                unsafe { ptr::copy(from, to, n) };
                self.copied += n as u64;
                TRUE
            }
            Err(error) => self.fail(error),
        }
    }

    /// A procedure may leave room for a length that it fills in later (RPCSEC_GSS skips one word this way): the room reads as
    /// zeros until then. A page is more than anybody skips.
    #[inline]
    fn set_position(&mut self, position: usize) -> c_int {
        if position > self.high {
            if position - self.high > STEP {
                return FALSE;
            }
            let gap = position - self.high;
            let before = std::mem::replace(&mut self.at, self.high);
            match self.take(gap) {
                // SAFETY: `take` gave `gap` writable bytes.
                Ok(to) => unsafe { ptr::write_bytes(to, 0, gap) },
                Err(error) => {
                    self.at = before;
                    return self.fail(error);
                }
            }
        }
        self.at = position;
        TRUE
    }

    /// NULL tells a procedure to put the items one by one, and those puts say what is wrong: no failure is noted here.
    #[inline]
    fn inline(&mut self, n: usize) -> *mut i32 {
        // The block is aligned to a page: the position decides.
        if !self.at.is_multiple_of(4) {
            return ptr::null_mut();
        }
        let old = self.high;
        let Ok(to) = self.take(n) else { return ptr::null_mut() };
        if self.at > old {
            // Memory from a pool holds an earlier message: what the program leaves out must not reach the
            // peer.
            // SAFETY: `old < at <= room <= buf.len()`: inside the block.
            let fresh = unsafe { self.base.add(old) };
            // SAFETY: `fresh .. base + at` is inside the block, and no reference to it exists.
            unsafe { fresh.write_bytes(0, self.at - old) };
        }
        to.cast()
    }
}

/// State of a [`Decoder`].
struct Decoding {
    sources: Regions,
    /// Position of their first byte: the stream goes back no farther.
    base: usize,
    /// The current source.
    index: usize,
    /// Position of the end of the current source.
    end: usize,
    /// The next byte.
    next: *const u8,
    /// Bytes from `next` to the end of the current source.
    left: usize,
    /// Position of the end of the stream.
    total: usize,
    /// What follows the sources; there, `index` is the number of sources.
    rest: Option<Box<Rest>>,
    copied: u64,
}

/// The part of a stream that the peer still has.
struct Rest {
    shown: Shown,
    /// Position of its first byte.
    begins: usize,
    /// A window of its bytes, and how many of them are held: those before the end of the current source.
    window: Vec<u8>,
    held: usize,
}

/// Most bytes of a window. And the fewest bytes that, decoded in one go, are copied at once to where they belong.
pub const WINDOW: usize = 16 << 10;
const AT_ONCE: usize = 4 << 10;

impl Decoding {
    fn position(&self) -> usize {
        self.end - self.left
    }

    fn remaining(&self) -> usize {
        self.total - self.position()
    }

    /// Goes to the first byte of source `index`, which lies at `position`.
    fn enter(&mut self, index: usize, position: usize) {
        let bytes = self.sources.get(index).map_or(&[][..], |source| source);
        self.index = index;
        // INVARIANT: the current source is `next .. next + left`, cut where the stream ends.
        self.left = bytes.len().min(self.total - position);
        self.next = bytes.as_ptr();
        self.end = position + self.left;
    }

    /// Goes on to the first source that has bytes, when the current one has none left.
    #[cold]
    fn next_source(&mut self) {
        self.next_own();
        if self.left == 0 {
            self.next_window();
        }
    }

    /// The same for a caller that wants `n` bytes in one piece, and may get none. Then nothing is taken from the peer either: the
    /// stream, whose position has not moved, can still go back to all that came before.
    #[cold]
    fn next_of(&mut self, n: usize) {
        self.next_own();
        if self.left == 0 && n > 0 && n <= self.next_window_len() {
            self.next_window();
        }
    }

    fn next_window_len(&self) -> usize {
        WINDOW.min(self.total - self.end)
    }

    fn next_own(&mut self) {
        while self.left == 0 && self.index + 1 < self.sources.len() {
            self.enter(self.index + 1, self.end);
        }
    }

    /// Takes the next window from the peer, if there is more.
    fn next_window(&mut self) {
        let n = self.next_window_len();
        let Some(rest) = self.rest.as_mut().filter(|_| n > 0) else { return };
        rest.held = 0;
        if rest.window.len() < n {
            if rest.window.try_reserve_exact(n).is_err() {
                // As if the stream ended here.
                self.total = self.end;
                return;
            }
            rest.window.resize(n, 0);
        }
        let to = rest.window.as_mut_ptr();
        // SAFETY: `to` has `n` bytes, which are ours.
        if unsafe { self.take(to, n) } {
            self.next = to;
            self.left = n;
            if let Some(rest) = &mut self.rest {
                rest.held = n;
            }
        }
    }

    /// Gets all that follows into one piece of our own, if there is memory for it: the stream then begins here. Where the peer
    /// has taken its part back, the stream ends with what is here already.
    #[cold]
    fn fetch(&mut self) {
        let (position, n) = (self.position(), self.remaining());
        let Some(rest) = &self.rest else { return };
        let Ok(mut own) = Buf::with_capacity(n) else { return };
        let mut here = 0;
        let mut add = |bytes: &[u8]| {
            let bytes = &bytes[..bytes.len().min(n - here)];
            here += bytes.len();
            own.extend(bytes).is_ok()
        };
        let current = match self.left {
            0 => &[],
            // SAFETY: `left` bytes are readable from `next`, which a source or the window keeps.
            left => unsafe { std::slice::from_raw_parts(self.next, left) },
        };
        let behind = self.sources.iter().skip(self.index + 1).map(|source| &source[..]);
        if ![current].into_iter().chain(behind).all(&mut add) {
            return;
        }
        own.set_len(n);
        let from = position + here;
        if here < n && !rest.shown.copy(from - rest.begins, IoVecMut::from_mut(&mut own[here..])) {
            self.total = from;
            return;
        }
        (self.sources, self.base, self.rest) = (smallvec::smallvec![own.freeze()], position, None);
        self.enter(0, position);
    }

    /// Copies the next `n` bytes, which the peer has, to `to`. Returns false when it has taken them back: the stream ends here.
    ///
    /// # Safety
    /// `to` is writable for `n` bytes.
    unsafe fn take(&mut self, to: *mut u8, n: usize) -> bool {
        let Some(rest) = self.rest.as_mut().filter(|_| n <= self.total - self.end) else { return false };
        rest.held = 0;
        // SAFETY: by contract; nobody else uses `to` while it is written.
        let to = unsafe { IoVecMut::of_program(to, n) };
        if !rest.shown.copy(self.end - rest.begins, to) {
            self.total = self.end;
            return false;
        }
        self.index = self.sources.len();
        self.end += n;
        true
    }

    #[inline]
    fn skip(&mut self, n: usize) {
        // SAFETY: every caller has compared `n` with `left`: inside the current source, or at its end.
        self.next = unsafe { self.next.add(n) };
        self.left -= n;
    }

    /// Copies the next `n` bytes to `to`, or none when there are fewer.
    ///
    /// # Safety
    /// `to` is writable for `n` bytes.
    #[inline]
    unsafe fn copy(&mut self, to: *mut u8, n: usize) -> bool {
        if n > self.left {
            // SAFETY: the same contract.
            return unsafe { self.copy_across(to, n) };
        }
        // SAFETY: `n <= left` bytes can be read at `next`; `to` by contract. A program may have given memory
        // of the stream itself (from XDR_INLINE), hence not `copy_nonoverlapping`.
        unsafe { ptr::copy(self.next, to, n) };
        self.skip(n);
        true
    }

    /// # Safety
    /// As `copy`.
    #[cold]
    unsafe fn copy_across(&mut self, to: *mut u8, n: usize) -> bool {
        if n > self.remaining() {
            return false;
        }
        let mut done = 0;
        while done < n {
            self.next_own();
            if self.left == 0 && n - done >= AT_ONCE && self.rest.is_some() {
                // SAFETY: `done < n`, and `to` is writable for `n` bytes.
                return unsafe { self.take(to.wrapping_add(done), n - done) };
            }
            self.next_source();
            let part = self.left.min(n - done);
            if part == 0 {
                return false;
            }
            // SAFETY: `done < n`, and `to` is writable for `n` bytes.
            let to = unsafe { to.add(done) };
            // SAFETY: `part <= left` bytes can be read at `next`; `done + part <= n` bytes of `to` are
            // written.
            unsafe { ptr::copy(self.next, to, part) };
            self.skip(part);
            done += part;
        }
        true
    }

    #[inline]
    fn get_long(&mut self) -> Option<u32> {
        let mut bytes = [0; 4];
        // SAFETY: `bytes` has 4 bytes.
        let there = unsafe { self.copy(bytes.as_mut_ptr(), 4) };
        there.then_some(u32::from_be_bytes(bytes))
    }

    /// # Safety
    /// `to` is writable for `n` bytes.
    #[inline]
    unsafe fn get_bytes(&mut self, to: *mut u8, n: usize) -> c_int {
        if n == 0 {
            return TRUE;
        }
        if self.left == 0 {
            self.next_own();
        }
        // A result may lie in its place already: it came into the program's own buffer.
        if ptr::eq(self.next, to) && n <= self.left {
            self.skip(n);
            return TRUE;
        }
        // SAFETY: by contract, once it is not NULL.
        if to.is_null() || !unsafe { self.copy(to, n) } {
            return FALSE;
        }
        self.copied += n as u64;
        TRUE
    }

    fn set_position(&mut self, position: usize) -> c_int {
        if position > self.total {
            return FALSE;
        }
        if let Some(rest) = &mut self.rest {
            if self.index == self.sources.len() && position <= self.end {
                // What was taken before is not taken a second time.
                let Some(at) = (position + rest.held).checked_sub(self.end) else { return FALSE };
                self.next = rest.window.as_ptr().wrapping_add(at);
                self.left = self.end - position;
                return TRUE;
            }
            if position > rest.begins {
                // What is passed over is never taken.
                rest.held = 0;
                (self.index, self.end, self.left) = (self.sources.len(), position, 0);
                return TRUE;
            }
        }
        if position < self.base {
            return FALSE;
        }
        self.enter(0, self.base);
        while position > self.end {
            self.enter(self.index + 1, self.end);
        }
        self.skip(position - self.position());
        TRUE
    }

    #[inline]
    fn inline(&mut self, n: usize) -> *mut i32 {
        if self.left == 0 {
            self.next_of(n);
        }
        if n > self.left || self.next.align_offset(4) != 0 {
            return ptr::null_mut();
        }
        let at = self.next;
        self.skip(n);
        at.cast_mut().cast()
    }
}

static ENCODE: XdrOps = XdrOps {
    getlong: refuse_getlong,
    putlong: encode_putlong,
    getbytes: refuse_getbytes,
    putbytes: encode_putbytes,
    getpostn: encode_getpostn,
    setpostn: encode_setpostn,
    inline: encode_inline,
    destroy: Some(destroy),
    control: None,
};

static DECODE: XdrOps = XdrOps {
    getlong: decode_getlong,
    putlong: refuse_putlong,
    getbytes: decode_getbytes,
    putbytes: refuse_putbytes,
    getpostn: decode_getpostn,
    setpostn: decode_setpostn,
    inline: decode_inline,
    destroy: Some(destroy),
    control: None,
};

/// A stream without memory, for FREE.
static NOTHING: XdrOps = XdrOps {
    getlong: refuse_getlong,
    putlong: refuse_putlong,
    getbytes: refuse_getbytes,
    putbytes: refuse_putbytes,
    getpostn: refuse_getpostn,
    setpostn: refuse_setpostn,
    inline: refuse_inline,
    destroy: Some(destroy),
    control: None,
};

/// The state behind a C handle.
///
/// # Safety
/// `xdrs` is the handle of a live stream whose operations belong to `S`, and no other reference to its state exists.
#[inline]
unsafe fn state<'a, S>(xdrs: *mut XDR) -> &'a mut S {
    // SAFETY: a live handle by contract.
    let state = unsafe { (*xdrs).x_private };
    // SAFETY: `x_private` was set by `Stream::leak` to an `S`, which is alive and not borrowed by contract.
    unsafe { &mut *state.cast::<S>() }
}

unsafe extern "C" fn encode_putlong(xdrs: *mut XDR, value: *const c_long) -> c_int {
    guard(|| {
        // SAFETY: this operation is in ENCODE only, and C runs one operation of a stream at a time.
        let state = unsafe { state::<Encoding>(xdrs) };
        // SAFETY: the procedure passes a pointer to its long.
        Ok(state.put_long(unsafe { *value }))
    })
}

unsafe extern "C" fn encode_putbytes(xdrs: *mut XDR, from: *const c_char, n: c_uint) -> c_int {
    guard(|| {
        // SAFETY: as in `encode_putlong`.
        let state = unsafe { state::<Encoding>(xdrs) };
        // SAFETY: the procedure passes `n` readable bytes.
        Ok(unsafe { state.put_bytes(from.cast(), n as usize) })
    })
}

unsafe extern "C" fn encode_getpostn(xdrs: *mut XDR) -> c_uint {
    guard(|| {
        // SAFETY: as in `encode_putlong`.
        let state = unsafe { state::<Encoding>(xdrs) };
        // Not more than MESSAGE_MAX.
        Ok(state.at as c_uint)
    })
}

unsafe extern "C" fn encode_setpostn(xdrs: *mut XDR, position: c_uint) -> c_int {
    guard(|| {
        // SAFETY: as in `encode_putlong`.
        let state = unsafe { state::<Encoding>(xdrs) };
        Ok(state.set_position(position as usize))
    })
}

unsafe extern "C" fn encode_inline(xdrs: *mut XDR, n: c_uint) -> *mut i32 {
    guard(|| {
        // SAFETY: as in `encode_putlong`.
        let state = unsafe { state::<Encoding>(xdrs) };
        Ok(state.inline(n as usize))
    })
}

unsafe extern "C" fn decode_getlong(xdrs: *mut XDR, value: *mut c_long) -> c_int {
    guard(|| {
        // SAFETY: this operation is in DECODE only, and C runs one operation of a stream at a time.
        let state = unsafe { state::<Decoding>(xdrs) };
        let Some(long) = state.get_long() else { return Ok(FALSE) };
        // Extended by zero, as libtirpc's streams do: its xdr_long(-1) decodes as 4294967295.
        // SAFETY: the procedure passes a pointer to its long.
        unsafe { *value = c_long::from(long) };
        Ok(TRUE)
    })
}

unsafe extern "C" fn decode_getbytes(xdrs: *mut XDR, to: *mut c_char, n: c_uint) -> c_int {
    guard(|| {
        // SAFETY: as in `decode_getlong`.
        let state = unsafe { state::<Decoding>(xdrs) };
        // SAFETY: the procedure passes `n` writable bytes.
        Ok(unsafe { state.get_bytes(to.cast(), n as usize) })
    })
}

unsafe extern "C" fn decode_getpostn(xdrs: *mut XDR) -> c_uint {
    guard(|| {
        // SAFETY: as in `decode_getlong`.
        let state = unsafe { state::<Decoding>(xdrs) };
        // Not more than `total`, which is a u32.
        Ok(state.position() as c_uint)
    })
}

unsafe extern "C" fn decode_setpostn(xdrs: *mut XDR, position: c_uint) -> c_int {
    guard(|| {
        // SAFETY: as in `decode_getlong`.
        let state = unsafe { state::<Decoding>(xdrs) };
        Ok(state.set_position(position as usize))
    })
}

unsafe extern "C" fn decode_inline(xdrs: *mut XDR, n: c_uint) -> *mut i32 {
    guard(|| {
        // SAFETY: as in `decode_getlong`.
        let state = unsafe { state::<Decoding>(xdrs) };
        Ok(state.inline(n as usize))
    })
}

/// XDR_DESTROY by a procedure does nothing: the stream belongs to its Encoder or Decoder.
unsafe extern "C" fn destroy(_: *mut XDR) {
    guard(|| Ok(()))
}

unsafe extern "C" fn refuse_getlong(_: *mut XDR, _: *mut c_long) -> c_int {
    guard(|| Ok(FALSE))
}

unsafe extern "C" fn refuse_putlong(_: *mut XDR, _: *const c_long) -> c_int {
    guard(|| Ok(FALSE))
}

unsafe extern "C" fn refuse_getbytes(_: *mut XDR, _: *mut c_char, _: c_uint) -> c_int {
    guard(|| Ok(FALSE))
}

unsafe extern "C" fn refuse_putbytes(_: *mut XDR, _: *const c_char, _: c_uint) -> c_int {
    guard(|| Ok(FALSE))
}

unsafe extern "C" fn refuse_getpostn(_: *mut XDR) -> c_uint {
    guard(|| Ok(0))
}

unsafe extern "C" fn refuse_setpostn(_: *mut XDR, _: c_uint) -> c_int {
    guard(|| Ok(FALSE))
}

unsafe extern "C" fn refuse_inline(_: *mut XDR, _: c_uint) -> *mut i32 {
    guard(|| Ok(ptr::null_mut()))
}

#[cfg(test)]
mod tests;
