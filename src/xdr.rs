//! XDR streams: they run a C program's xdrproc over our memory.
//!
//! libtirpc hands a program's types over as procedures that walk an `XDR`, a struct with a table of
//! operations ([`XdrOps`], `rpc/xdr.h`). This file owns two such streams and nothing else: [`Encoder`]
//! appends to one contiguous, growing [`Buf`]; [`Decoder`] reads what a device has placed, in as many pieces
//! as it came. What a message means, and when it is sent, belongs to the modules above.
//!
//! Stream position 0 is the XID and no transport header lies in the stream: RPCSEC_GSS signs bytes 0 ..
//! GETPOS, and an RFC 8166 Position counts from the same byte (§3.4.5). Each operation behaves as libtirpc's
//! `xdrmem` does, including its oddities; where that one would read or write outside its memory, ours answers
//! FALSE.
//!
//! Every item enters a message through `put_bytes`, and only there is known to be one item with an address of
//! its own: there it is copied or, if [`Encoder::lend`] allows it, left where it lies. The message has a hole
//! of its size then, so that positions stay what they are. The end of a message is its position, not the
//! length of a buffer.
//!
//! # Invariants
//! - `Encoding`: `at <= high <= u32::MAX`; `base` points to the first byte of `buf`, and `room <= buf.len()`.
//! - `Encoding`: `lent` is sorted, its items do not overlap, and nothing was put over them since.
//! - `Decoding`: `next .. next + left` lies inside the current source; `end - left` is the position.
//! - The heap object that `x_private` points into never moves and is reached through raw pointers only.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of, size_of};
use std::ptr::{self, NonNull};

use crate::error::{Error, Kind};
use crate::ffi::guard;
use crate::memory::{Buf, Message, Region, Regions};

/// A program's `xdrproc_t`: encodes, decodes or frees (`x_op`) one object.
///
/// C declares it variadic because some of its procedures take a third argument, a maximum length. Nobody
/// passes that one: libtirpc's own transports call with two arguments, and so do we. A procedure that reads a
/// third (a bare `xdr_string`) finds there what it always found, the leftovers of a register;
/// `xdr_wrapstring` exists for it. On x86-64 a call with two pointers is the same for a variadic and for a
/// plain C function.
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

    /// Puts whole XDR words, as an xdrproc does with `XDR_PUTBYTES`. False without memory or over the limit.
    #[must_use]
    pub fn put(&mut self, words: &[u8]) -> bool {
        // SAFETY: the stream is alive until `drop`, and `&mut self` makes this the only reference to it.
        let state = unsafe { &mut (*self.stream.as_ptr()).state };
        // SAFETY: `words` is readable for its length.
        (unsafe { state.put_bytes(words.as_ptr(), words.len()) }) == TRUE
    }

    /// Makes every put fail that would end beyond `bytes`. The default is just short of 4 GiB, as is the
    /// maximum.
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
    /// What an xdrproc puts stays valid and unchanged until all loans of the finished message are over
    /// ([`Message::loans`]), where `lending` chooses it.
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
    /// # Errors Why the first failed put failed: `TooLong` over the limit, `Encode` without memory. A
    /// procedure that failed for a reason of its own leaves no error here: its FALSE says so.
    pub fn finish(self) -> Result<Message, Error> {
        let stream = self.stream;
        std::mem::forget(self);
        // SAFETY: `stream` came from `Stream::leak` in `new`, and `drop` does not run any more.
        let mut state = unsafe { Stream::end(stream) };
        // An item that the end cuts off is a part of the message only up to there.
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
    /// Shorter items are copied, bytes.
    pub at_least: usize,
    /// Told what is encoded so far, address and length of an item that would follow: whether it is lent.
    #[allow(clippy::type_complexity)]
    pub which: Box<dyn Fn(&[u8], *const u8, usize) -> bool + Send>,
    /// The put of the first lent item fails: nobody wants what follows it.
    pub stop: bool,
}

/// The stream that a message is decoded from: the concatenation of its pieces.
pub struct Decoder {
    /// From `Stream::leak`, as in [`Encoder`].
    stream: NonNull<Stream<Decoding>>,
}

impl Decoder {
    /// A stream over `segments`, in order. A stream ends at 4 GiB, where the positions of XDR end.
    pub fn new(segments: Regions) -> Decoder {
        let sum = segments.iter().fold(0usize, |sum, s| sum.saturating_add(s.len()));
        let mut state = Decoding {
            sources: segments,
            index: 0,
            end: 0,
            next: NonNull::dangling().as_ptr(),
            left: 0,
            total: sum.min(u32::MAX as usize),
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

/// Runs `proc` over `object` to release what decoding allocated (`xdr_free`), on a stream without memory.
///
/// # Safety `proc` is NULL or a procedure for the type of `object`, and `object` is what it may free: decoded
/// by it, or zeroed.
pub unsafe fn free(proc: XdrProc, object: *mut c_void) {
    let Some(proc) = proc else { return };
    let mut xdr = XDR {
        x_op: op::FREE,
        x_ops: &NOTHING,
        x_public: ptr::null_mut(),
        x_private: ptr::null_mut(),
        x_base: ptr::null_mut(),
        x_handy: 0,
    };
    // SAFETY: the caller's contract; `xdr` lives across the call, and its operations refuse to do anything.
    unsafe { proc(&raw mut xdr, object) };
}

/// A C handle and what its operations work on. `x_private` points to `state`, and to nothing else.
struct Stream<S> {
    xdr: XDR,
    state: S,
}

/// What a thread keeps of its latest stream: the memory, for its next one, so that no call allocates any.
type Spare<S> = Cell<Option<Box<MaybeUninit<Stream<S>>>>>;

/// A kind of stream.
trait Kept: Sized + 'static {
    /// Calls `f` with the thread's own, unless the thread is about to end.
    fn spare<R>(f: impl FnOnce(&Spare<Self>) -> R) -> Option<R>;
}

impl Kept for Encoding {
    fn spare<R>(f: impl FnOnce(&Spare<Encoding>) -> R) -> Option<R> {
        thread_local! {
            static SPARE: Spare<Encoding> = const { Cell::new(None) };
        }
        SPARE.try_with(f).ok()
    }
}

impl Kept for Decoding {
    fn spare<R>(f: impl FnOnce(&Spare<Decoding>) -> R) -> Option<R> {
        thread_local! {
            static SPARE: Spare<Decoding> = const { Cell::new(None) };
        }
        SPARE.try_with(f).ok()
    }
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
        let memory = S::spare(Cell::take).flatten().unwrap_or_else(Box::new_uninit);
        let stream = NonNull::from(Box::leak(Box::write(memory, Stream { xdr, state })));
        // SAFETY: the box was just leaked: alive, and known to nobody else. No reference is made.
        let state = unsafe { &raw mut (*stream.as_ptr()).state };
        // SAFETY: as above.
        unsafe { (*stream.as_ptr()).xdr.x_private = state.cast() };
        stream
    }

    /// What it worked on.
    ///
    /// # Safety
    /// It came from [`Stream::leak`], and is not used any more.
    unsafe fn end(stream: NonNull<Stream<S>>) -> S {
        // SAFETY: alive (contract). Nobody reads it again: its memory is uninitialised from here on.
        let Stream { state, .. } = unsafe { stream.as_ptr().read() };
        // SAFETY: from `Box::leak`, of this layout.
        let memory = unsafe { Box::from_raw(stream.as_ptr().cast::<MaybeUninit<Stream<S>>>()) };
        // This thread's, whichever has made it.
        S::spare(|spare| spare.set(Some(memory)));
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
    /// End of what was ever encoded: positions up to here may be gone back to.
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
    /// Takes `n` bytes from the position on. What they hold is for the caller to write.
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

    /// Copies lent items into the message after all that `from .. to` touches: something else is put over them.
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

    /// A procedure may leave room for a length that it fills in later (RPCSEC_GSS skips one word so): the room reads
    /// as zeros until then. A page is more than anybody skips.
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

    /// NULL tells a procedure to put the items one by one, and those say what is wrong: no failure is noted
    /// here.
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
    copied: u64,
}

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

    /// Goes on with the first source that has bytes, when the current one has none left.
    #[cold]
    fn next_source(&mut self) {
        while self.left == 0 && self.index + 1 < self.sources.len() {
            self.enter(self.index + 1, self.end);
        }
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
            self.next_source();
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
        self.enter(0, 0);
        while position > self.end {
            self.enter(self.index + 1, self.end);
        }
        self.skip(position - self.position());
        TRUE
    }

    #[inline]
    fn inline(&mut self, n: usize) -> *mut i32 {
        if self.left == 0 {
            self.next_source();
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
/// # Safety `xdrs` is the handle of a live stream whose operations belong to `S`, and no other reference to
/// its state exists.
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
        // Extended by zero, as libtirpc's streams do it: its xdr_long(-1) decodes as 4294967295.
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

/// XDR_DESTROY of a procedure does nothing: the stream belongs to its Encoder or Decoder.
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
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::ffi::last_error;
    use crate::memory::Pool;

    // The real procedures, and the stream of libtirpc that ours are compared with. A module above declares some
    // of them with structures of its own.
    #[allow(clashing_extern_declarations)]
    #[link(name = "tirpc")]
    unsafe extern "C" {
        fn xdrmem_create(xdrs: *mut XDR, addr: *mut c_char, size: c_uint, op: c_int);
        fn xdr_u_int(xdrs: *mut XDR, value: *mut c_uint) -> c_int;
        fn xdr_long(xdrs: *mut XDR, value: *mut c_long) -> c_int;
        fn xdr_hyper(xdrs: *mut XDR, value: *mut i64) -> c_int;
        fn xdr_double(xdrs: *mut XDR, value: *mut f64) -> c_int;
        fn xdr_bytes(xdrs: *mut XDR, data: *mut *mut c_char, len: *mut c_uint, max: c_uint) -> c_int;
        fn xdr_string(xdrs: *mut XDR, data: *mut *mut c_char, max: c_uint) -> c_int;
        fn xdr_opaque(xdrs: *mut XDR, data: *mut c_char, len: c_uint) -> c_int;
        fn xdr_array(
            xdrs: *mut XDR,
            data: *mut *mut c_char,
            len: *mut c_uint,
            max: c_uint,
            size: c_uint,
            proc: XdrProc,
        ) -> c_int;
        fn xdr_callmsg(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
        fn xdr_callhdr(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
        fn xdr_replymsg(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct OpaqueAuth {
        flavor: c_int,
        base: *mut c_char,
        length: c_uint,
    }

    /// `struct rpc_msg` with its call, or its accepted reply.
    #[repr(C)]
    struct RpcMsg {
        xid: u32,
        direction: c_int,
        body: Body,
    }

    #[repr(C)]
    union Body {
        call: Call,
        reply: Reply,
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Call {
        rpcvers: u32,
        prog: u32,
        vers: u32,
        proc: u32,
        cred: OpaqueAuth,
        verf: OpaqueAuth,
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Reply {
        stat: c_int,
        verf: OpaqueAuth,
        accept_stat: c_int,
        r#where: *mut c_void,
        proc: XdrProc,
    }

    const _: () = assert!(size_of::<RpcMsg>() == 72 && size_of::<Reply>() == 56);

    fn auth(flavor: c_int, body: &mut [u8]) -> OpaqueAuth {
        OpaqueAuth { flavor, base: body.as_mut_ptr().cast(), length: body.len() as c_uint }
    }

    fn call_message(cred: OpaqueAuth, verf: OpaqueAuth) -> RpcMsg {
        let call = Call { rpcvers: 2, prog: 0x2000_0001, vers: 3, proc: 7, cred, verf };
        RpcMsg { xid: 0x1234_5678, direction: 0, body: Body { call } }
    }

    #[test]
    fn a_stream_is_made_in_the_memory_of_the_one_that_has_ended_before_it() {
        let encoder = || Encoder::new(Buf::with_capacity(STEP).unwrap());
        let (first, mut second) = (encoder(), encoder());
        let (one, two) = (first.stream, second.stream);
        assert_ne!(one, two);
        assert!(second.put(b"word"));
        drop(first);
        let third = encoder();
        assert_eq!(third.stream, one);
        // Nothing is left there of the one before.
        assert_eq!((third.position(), third.copied()), (0, 0));
        assert_eq!(second.finish().unwrap().body(), b"word");
        assert_eq!(encoder().stream, two);
        let decoder = || Decoder::new(smallvec![Region::copy_from(b"word").unwrap()]);
        let at = decoder().stream;
        assert_eq!(decoder().stream, at);
    }

    /// One object with every kind of item.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Sample {
        int: c_uint,
        long: c_long,
        hyper: i64,
        double: f64,
        bytes: *mut c_char,
        bytes_len: c_uint,
        string: *mut c_char,
        array: *mut c_char,
        array_len: c_uint,
        opaque: [u8; 7],
    }

    impl Sample {
        const EMPTY: Sample = Sample {
            int: 0,
            long: 0,
            hyper: 0,
            double: 0.0,
            bytes: ptr::null_mut(),
            bytes_len: 0,
            string: ptr::null_mut(),
            array: ptr::null_mut(),
            array_len: 0,
            opaque: [0; 7],
        };

        /// Calls `f` with a sample whose pointers lead to live data.
        fn with<T>(f: impl FnOnce(&mut Sample) -> T) -> T {
            let mut bytes = *b"\x01\x02\x03\x04\x05\x06\x07\x08\x09";
            let mut string = *b"a string of 22 letters\0";
            let mut array = [1u32, 0x8000_0000, u32::MAX, 4, 5];
            f(&mut Sample {
                int: 0xfedc_ba98,
                long: -1,
                hyper: -0x0123_4567_89ab_cdef,
                double: 1.5e300,
                bytes: bytes.as_mut_ptr().cast(),
                bytes_len: 9,
                string: string.as_mut_ptr().cast(),
                array: array.as_mut_ptr().cast(),
                array_len: 5,
                opaque: *b"OPAQUE!",
            })
        }

        /// Whether `self`, which was decoded, is the sample of `with`.
        fn check(&self) {
            assert_eq!((self.int, self.long), (0xfedc_ba98, 0xffff_ffff));
            assert_eq!((self.hyper, self.double), (-0x0123_4567_89ab_cdef, 1.5e300));
            assert_eq!((self.bytes_len, self.array_len, &self.opaque), (9, 5, b"OPAQUE!"));
            // SAFETY: xdr_bytes has decoded 9 bytes.
            let bytes = unsafe { std::slice::from_raw_parts(self.bytes.cast::<u8>(), 9) };
            assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08\x09");
            // SAFETY: xdr_string ends what it decodes with NUL.
            let string = unsafe { std::ffi::CStr::from_ptr(self.string) };
            assert_eq!(string, c"a string of 22 letters");
            // SAFETY: xdr_array has decoded 5 words.
            let array = unsafe { std::slice::from_raw_parts(self.array.cast::<u32>(), 5) };
            assert_eq!(array, [1, 0x8000_0000, u32::MAX, 4, 5]);
        }
    }

    unsafe extern "C-unwind" fn word(xdrs: *mut XDR, object: *mut c_void) -> c_int {
        // SAFETY: called by xdr_array with a word.
        unsafe { xdr_u_int(xdrs, object.cast()) }
    }

    /// As rpcgen would write it.
    unsafe extern "C-unwind" fn sample(xdrs: *mut XDR, object: *mut c_void) -> c_int {
        // SAFETY: the tests pass a Sample.
        let s = unsafe { &mut *object.cast::<Sample>() };
        let steps: [&mut dyn FnMut() -> c_int; 8] = [
            // SAFETY: a live stream, and an object of the procedure's type; so in each of these.
            &mut || unsafe { xdr_u_int(xdrs, &mut s.int) },
            // SAFETY: as above.
            &mut || unsafe { xdr_long(xdrs, &mut s.long) },
            // SAFETY: as above.
            &mut || unsafe { xdr_hyper(xdrs, &mut s.hyper) },
            // SAFETY: as above.
            &mut || unsafe { xdr_double(xdrs, &mut s.double) },
            // SAFETY: as above.
            &mut || unsafe { xdr_bytes(xdrs, &mut s.bytes, &mut s.bytes_len, 100) },
            // SAFETY: as above.
            &mut || unsafe { xdr_string(xdrs, &mut s.string, 100) },
            // SAFETY: as above.
            &mut || unsafe { xdr_array(xdrs, &mut s.array, &mut s.array_len, 100, 4, Some(word)) },
            // SAFETY: as above.
            &mut || unsafe { xdr_opaque(xdrs, s.opaque.as_mut_ptr().cast(), 7) },
        ];
        steps.into_iter().all(|step| step() == TRUE).into()
    }

    /// Runs `f` over libtirpc's own memory stream, and returns what it encoded.
    fn on_xdrmem(f: impl FnOnce(*mut XDR)) -> Vec<u8> {
        let mut memory = vec![0xaau64; 256];
        let mut xdr = std::mem::MaybeUninit::<XDR>::zeroed();
        let xdrs = xdr.as_mut_ptr();
        // SAFETY: `xdrs` has the size of an XDR, `memory` has 2048 bytes; both outlive the stream.
        unsafe { xdrmem_create(xdrs, memory.as_mut_ptr().cast(), 2048, op::ENCODE) };
        f(xdrs);
        let len = getpos(xdrs) as usize;
        memory.iter().flat_map(|word| word.to_ne_bytes()).take(len).collect()
    }

    fn on_encoder(f: impl FnOnce(*mut XDR)) -> Vec<u8> {
        let mut encoder = encoder();
        f(encoder.xdr());
        encoder.finish().unwrap().into_body().to_vec()
    }

    fn encoder() -> Encoder {
        Encoder::new(Buf::with_capacity(STEP).unwrap())
    }

    fn decoder(pieces: &[&[u8]]) -> Decoder {
        Decoder::new(pieces.iter().map(|piece| Region::copy_from(piece).unwrap()).collect())
    }

    fn ops(xdrs: *mut XDR) -> &'static XdrOps {
        // SAFETY: a live handle.
        let ops = unsafe { (*xdrs).x_ops };
        // SAFETY: the operations of all streams are static.
        unsafe { &*ops }
    }

    fn putlong(xdrs: *mut XDR, value: c_long) -> bool {
        // SAFETY: a live handle and a live long.
        unsafe { (ops(xdrs).putlong)(xdrs, &value) == TRUE }
    }

    fn getlong(xdrs: *mut XDR) -> Option<c_long> {
        let mut value = -7;
        // SAFETY: a live handle and a live long.
        let there = unsafe { (ops(xdrs).getlong)(xdrs, &mut value) };
        (there == TRUE).then_some(value)
    }

    fn putbytes(xdrs: *mut XDR, bytes: &[u8]) -> bool {
        // SAFETY: a live handle and live bytes.
        unsafe { (ops(xdrs).putbytes)(xdrs, bytes.as_ptr().cast(), bytes.len() as c_uint) == TRUE }
    }

    fn getbytes(xdrs: *mut XDR, n: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0x55; n];
        // SAFETY: a live handle and `n` writable bytes.
        let there = unsafe { (ops(xdrs).getbytes)(xdrs, bytes.as_mut_ptr().cast(), n as c_uint) };
        (there == TRUE).then_some(bytes)
    }

    fn getpos(xdrs: *mut XDR) -> c_uint {
        // SAFETY: a live handle.
        unsafe { (ops(xdrs).getpostn)(xdrs) }
    }

    fn setpos(xdrs: *mut XDR, position: c_uint) -> bool {
        // SAFETY: a live handle.
        unsafe { (ops(xdrs).setpostn)(xdrs, position) == TRUE }
    }

    /// XDR_INLINE; the bytes are usable until the next operation. NULL because of a panic does not pass.
    fn inline<'a>(xdrs: *mut XDR, n: usize) -> Option<&'a mut [u8]> {
        // SAFETY: a live handle.
        let at = unsafe { (ops(xdrs).inline)(xdrs, n as c_uint) };
        assert!(last_error().is_none());
        // SAFETY: what this test is about: NULL or `n` bytes, which no reference of the stream covers.
        (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(at.cast(), n) })
    }

    fn xorshift(seed: &mut u64) -> usize {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        (*seed >> 8) as usize
    }

    #[test]
    fn the_real_procedures_encode_the_same_bytes_as_on_xdrmem() {
        let run = |xdrs: *mut XDR| {
            // SAFETY: a live stream and a Sample.
            Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
        };
        assert_eq!(on_encoder(run), on_xdrmem(run));
        assert_eq!(on_encoder(run).len(), 4 + 4 + 8 + 8 + 16 + 28 + 24 + 8);
    }

    #[test]
    fn call_and_reply_headers_are_encoded_as_on_xdrmem() {
        let calls = |xdrs: *mut XDR| {
            let (mut cred, mut verf) = ([7u8; 37], [9u8; 5]);
            let mut msg = call_message(auth(1, &mut cred), auth(2, &mut verf));
            // SAFETY: a live stream and a call. This one uses XDR_INLINE.
            assert_eq!(unsafe { xdr_callmsg(xdrs, &mut msg) }, TRUE);
            // SAFETY: as above.
            assert_eq!(unsafe { xdr_callhdr(xdrs, &mut msg) }, TRUE);
        };
        assert_eq!(on_encoder(calls), on_xdrmem(calls));
        assert_eq!(on_encoder(calls).len(), 40 + 40 + 8 + 20);
        let reply = |xdrs: *mut XDR| {
            Sample::with(|s| {
                let mut verf = [3u8; 11];
                let reply = Reply {
                    stat: 0,
                    verf: auth(6, &mut verf),
                    accept_stat: 0,
                    r#where: ptr::from_mut(s).cast(),
                    proc: Some(sample),
                };
                let mut msg = RpcMsg { xid: 1, direction: 1, body: Body { reply } };
                // SAFETY: a live stream and an accepted reply whose procedure fits its object.
                assert_eq!(unsafe { xdr_replymsg(xdrs, &mut msg) }, TRUE);
            });
        };
        assert_eq!(on_encoder(reply), on_xdrmem(reply));
    }

    #[test]
    fn an_object_decodes_over_every_split() {
        let message = on_encoder(|xdrs| {
            // SAFETY: a live stream and a Sample.
            Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
        });
        let decode = |pieces: &[&[u8]]| {
            let mut decoder = decoder(pieces);
            let mut object = Sample::EMPTY;
            // SAFETY: a live stream and an empty Sample.
            assert_eq!(unsafe { sample(decoder.xdr(), (&raw mut object).cast()) }, TRUE);
            object.check();
            assert_eq!((decoder.position(), decoder.remaining()), (message.len(), 0));
            // SAFETY: decoded by this very procedure.
            unsafe { free(Some(sample), (&raw mut object).cast()) };
            assert!(object.bytes.is_null() && object.string.is_null() && object.array.is_null());
        };
        for split in 0..=message.len() {
            let (head, tail) = message.split_at(split);
            decode(&[head, tail]);
            let (middle, end) = tail.split_at(tail.len().min(1 + split % 6));
            decode(&[head, middle, b"", end]);
        }
        decode(&message.chunks(1).collect::<Vec<_>>());
    }

    #[test]
    fn a_call_header_decodes_over_every_split() {
        let (mut cred, mut verf) = ([7u8; 36], [9u8; 8]);
        let message = on_encoder(|xdrs| {
            let mut msg = call_message(auth(1, &mut cred), auth(2, &mut verf));
            // SAFETY: a live stream and a call.
            assert_eq!(unsafe { xdr_callmsg(xdrs, &mut msg) }, TRUE);
        });
        for split in 0..=message.len() {
            let (head, tail) = message.split_at(split);
            let mut decoder = decoder(&[head, tail]);
            let (mut cred, mut verf) = ([0u8; 400], [0u8; 400]);
            let mut msg = call_message(auth(0, &mut cred), auth(0, &mut verf));
            msg.xid = 0;
            // SAFETY: a live stream and a message with 400 bytes for each body, as libtirpc's own loop gives.
            assert_eq!(unsafe { xdr_callmsg(decoder.xdr(), &mut msg) }, TRUE);
            // SAFETY: a call was decoded; a union of plain data.
            let call = unsafe { msg.body.call };
            assert_eq!((msg.xid, call.prog, call.vers, call.proc), (0x1234_5678, 0x2000_0001, 3, 7));
            assert_eq!((call.cred.flavor, call.cred.length, &cred[..36]), (1, 36, &[7; 36][..]));
            assert_eq!((call.verf.flavor, call.verf.length, &verf[..8]), (2, 8, &[9; 8][..]));
            assert_eq!(decoder.remaining(), 0);
        }
    }

    #[test]
    fn a_message_cut_at_any_length_is_refused() {
        let message = on_encoder(|xdrs| {
            // SAFETY: a live stream and a Sample.
            Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
        });
        for len in 0..message.len() {
            let (head, tail) = message[..len].split_at(len / 2);
            let mut decoder = decoder(&[head, tail]);
            let mut object = Sample::EMPTY;
            // SAFETY: a live stream and an empty Sample.
            assert_eq!(unsafe { sample(decoder.xdr(), (&raw mut object).cast()) }, FALSE);
            let xdrs = decoder.xdr();
            // SAFETY: a live handle.
            unsafe { (*xdrs).x_op = op::FREE };
            // SAFETY: half decoded by this very procedure.
            assert_eq!(unsafe { sample(xdrs, (&raw mut object).cast()) }, TRUE);
        }
    }

    #[test]
    fn a_body_is_rewritten_in_place_as_gss_privacy_does_it() {
        // authgss: marshal signs bytes 0 .. GETPOS.
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        for word in 0..10 {
            assert!(putlong(xdrs, word));
        }
        let signed = getpos(xdrs);
        assert!(setpos(xdrs, 0));
        assert_eq!(inline(xdrs, signed as usize).unwrap()[36..], [0, 0, 0, 9]);
        assert_eq!(getpos(xdrs), signed);
        // xdr_rpc_gss_wrap_data: leaves room for a length, encodes, reads the body back, writes another.
        let start = getpos(xdrs);
        assert!(setpos(xdrs, start + 4));
        let body: Vec<u8> = (0..100_001u32).map(|i| (i % 251) as u8).collect();
        assert!(putlong(xdrs, 42) && putbytes(xdrs, &body) && putbytes(xdrs, &[0; 3]));
        let end = getpos(xdrs);
        assert!(setpos(xdrs, start + 4));
        let clear = inline(xdrs, (end - start - 4) as usize).unwrap().to_vec();
        assert_eq!((&clear[..4], &clear[4..100_005]), (&[0, 0, 0, 42][..], &body[..]));
        let sealed: Vec<u8> = clear.iter().map(|byte| byte ^ 0xff).chain([1, 2, 3, 4]).collect();
        assert!(setpos(xdrs, start) && putlong(xdrs, sealed.len() as c_long) && putbytes(xdrs, &sealed));
        let message = encoder.finish().unwrap().into_body();
        assert_eq!(message.len(), start as usize + 4 + sealed.len());
        assert_eq!(message[start as usize + 4..], sealed);
    }

    #[test]
    fn a_message_ends_where_the_stream_stands() {
        let message = on_encoder(|xdrs| {
            assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && putlong(xdrs, 3));
            assert!(setpos(xdrs, 4) && putlong(xdrs, 9));
        });
        assert_eq!(message, [0, 0, 0, 1, 0, 0, 0, 9]);
        let message = on_encoder(|xdrs| {
            assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && putlong(xdrs, 3));
            assert!(setpos(xdrs, 4) && putlong(xdrs, 9) && setpos(xdrs, 12));
        });
        assert_eq!(message, [0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 3]);
    }

    #[test]
    fn memory_of_an_earlier_message_does_not_show_in_bytes_left_out() {
        let pool = Pool::new(STEP, STEP, 1);
        let mut earlier = pool.take().unwrap();
        earlier.extend(&[0xee; STEP]).unwrap();
        drop(earlier);
        let mut encoder = Encoder::new(pool.take().unwrap());
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && setpos(xdrs, 4));
        assert_eq!(inline(xdrs, 12).unwrap(), [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(encoder.finish().unwrap().into_body()[4..], [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn growing_over_16_mib_keeps_every_byte() {
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        let mut word = 0u32;
        while encoder.position() < 17 << 20 {
            assert!(putlong(xdrs, c_long::from(word)));
            let piece: Vec<u8> = (1..=64).flat_map(|i| (word + i).to_be_bytes()).collect();
            assert!(putbytes(xdrs, &piece));
            inline(xdrs, 4).unwrap().copy_from_slice(&(word + 65).to_be_bytes());
            word += 66;
        }
        let copied = encoder.copied();
        let message = encoder.finish().unwrap().into_body();
        assert_eq!(copied, u64::from(word / 66 * 256));
        for (i, bytes) in message.chunks(4).enumerate() {
            assert_eq!(bytes, (i as u32).to_be_bytes());
        }
    }

    /// An encoder that lends items of at least 10 bytes.
    fn lending(which: impl Fn(&[u8], *const u8, usize) -> bool + Send + 'static) -> Encoder {
        let mut encoder = encoder();
        // SAFETY: the tests keep what they put until the message is gone.
        unsafe { encoder.lend(Lending { at_least: 10, which: Box::new(which), stop: false }) };
        encoder
    }

    #[test]
    fn an_item_that_is_lent_stays_where_it_lies_and_leaves_a_hole_of_its_size() {
        let (short, long) = ([1u8; 9], vec![2u8; 5000]);
        let mut encoder = lending(|so_far, _, n| so_far.len() == 16 && n == 5000);
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 7) && putbytes(xdrs, &short) && putbytes(xdrs, &[0; 3]));
        assert!(putbytes(xdrs, &long) && putlong(xdrs, 8));
        assert_eq!((encoder.position(), encoder.copied()), (5020, 12));
        assert_eq!(encoder.first_lent(), Some((long.as_ptr(), 5000)));
        let message = encoder.finish().unwrap();
        assert_eq!(message.lent().collect::<Vec<_>>(), [(16, 5000)]);
        let pieces = message.freeze().gather(0..5020);
        assert_eq!(pieces.iter().map(|p| p.len()).collect::<Vec<_>>(), [16, 5000, 4]);
        assert_eq!(pieces[1].as_ptr(), long.as_ptr());
        assert_eq!((&pieces[0][..5], &pieces[2][..]), (&[0, 0, 0, 7, 1][..], &[0, 0, 0, 8][..]));
    }

    #[test]
    fn an_item_is_copied_after_all_when_something_is_put_over_it_or_the_message_ends_inside() {
        let long = vec![2u8; 5000];
        let put = |then: &dyn Fn(*mut XDR)| {
            let mut encoder = lending(|_, _, _| true);
            let xdrs = encoder.xdr();
            assert!(putlong(xdrs, 7) && putbytes(xdrs, &long) && putbytes(xdrs, &long));
            then(xdrs);
            let copied = encoder.copied();
            let message = encoder.finish().unwrap();
            (copied, message.lent().count(), message.into_body().to_vec())
        };
        let end = |xdrs: *mut XDR| assert!(setpos(xdrs, 10_004));
        let (copied, lent, bytes) = put(&|xdrs| {
            assert!(setpos(xdrs, 5002) && putlong(xdrs, 9));
            end(xdrs);
        });
        assert_eq!((copied, lent), (10_000, 0));
        assert_eq!(bytes[5000..5008], [2, 2, 0, 0, 0, 9, 2, 2]);
        let (copied, lent, bytes) = put(&|xdrs| {
            assert!(setpos(xdrs, 8));
            assert_eq!(inline(xdrs, 8).unwrap(), [2; 8]);
            end(xdrs);
        });
        assert_eq!((copied, lent, bytes[4], bytes[10_003]), (5000, 1, 2, 2));
        let (_, lent, bytes) = put(&|xdrs| assert!(setpos(xdrs, 3000)));
        assert_eq!((lent, bytes.len(), bytes[2999]), (0, 3000, 2));
        let (copied, lent, _) = put(&|xdrs| {
            assert!(setpos(xdrs, 0) && putlong(xdrs, 9));
            end(xdrs);
        });
        assert_eq!((copied, lent), (0, 2));
    }

    #[test]
    fn a_probe_stops_at_the_first_item_that_it_looks_for() {
        let long = vec![2u8; 5000];
        let mut encoder = encoder();
        let which = Box::new(|so_far: &[u8], _: *const u8, _: usize| so_far.len() == 104);
        // SAFETY: nothing is sent.
        unsafe { encoder.lend(Lending { at_least: 10, which, stop: true }) };
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 7) && putbytes(xdrs, &long[..100]) && !putbytes(xdrs, &long[7..3000]));
        assert_eq!(encoder.first_lent(), Some((long[7..].as_ptr(), 2993)));
    }

    #[test]
    fn a_result_that_lies_in_its_place_is_not_copied() {
        let words: Vec<u8> = (0..24).collect();
        let region = Region::copy_from(&words).unwrap();
        let place = region[8..20].as_ptr().cast_mut();
        let mut decoder =
            Decoder::new(smallvec![region.slice(0, 8), region.slice(8, 12), region.slice(20, 4)]);
        let xdrs = decoder.xdr();
        assert!(getbytes(xdrs, 8).is_some());
        // SAFETY: not written, which is what the test is about: the bytes are there.
        assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, place.cast(), 12) }, TRUE);
        assert_eq!((decoder.copied(), decoder.position()), (8, 20));
        assert_eq!(getbytes(xdrs, 4).unwrap(), words[20..]);
    }

    #[test]
    fn an_encoder_may_move_between_operations() {
        let mut encoders: Vec<Encoder> = (0..3).map(|_| encoder()).collect();
        let handles: Vec<*mut XDR> = encoders.iter_mut().map(Encoder::xdr).collect();
        encoders.reverse();
        let encoders = std::thread::spawn(move || encoders).join().unwrap();
        for (i, xdrs) in handles.into_iter().enumerate() {
            assert!(putlong(xdrs, i as c_long));
        }
        let last: Vec<u8> = encoders.into_iter().map(|e| e.finish().unwrap().into_body()[3]).collect();
        assert_eq!(last, [2, 1, 0]);
    }

    #[test]
    fn a_put_over_the_limit_fails_and_the_error_names_it() {
        let mut encoder = encoder();
        encoder.set_limit(10);
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 1) && putbytes(xdrs, &[5; 6]) && getpos(xdrs) == 10);
        assert!(!putbytes(xdrs, &[5]));
        assert!(!putlong(xdrs, 1));
        assert_eq!((getpos(xdrs), encoder.copied()), (10, 6));
        // A put that fits afterwards does not mend the message.
        assert!(setpos(xdrs, 0) && putlong(xdrs, 1));
        let error = encoder.finish().map(Message::into_body).unwrap_err();
        assert_eq!(
            (error.kind(), error.text()),
            (Kind::TooLong, "the message is longer than its limit of 10 bytes")
        );
    }

    #[test]
    fn a_limit_below_the_position_stops_every_put() {
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        assert!(putbytes(xdrs, &[1; 100]));
        encoder.set_limit(50);
        assert!(!putlong(xdrs, 1) && inline(xdrs, 0).is_none());
        assert!(setpos(xdrs, 48) && !putlong(xdrs, 1));
        assert!(setpos(xdrs, 46) && putlong(xdrs, 1));
        assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::TooLong);
    }

    #[test]
    fn a_position_that_cannot_be_set_leaves_the_stream_where_it_was() {
        let mut encoder = encoder();
        encoder.set_limit(10);
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && setpos(xdrs, 4));
        // Over the limit by a little, and farther than anybody skips.
        for position in [11, 5000] {
            assert!(!setpos(xdrs, position));
            assert_eq!(getpos(xdrs), 4);
        }
        assert!(putlong(xdrs, 3));
        assert_eq!(encoder.encoded(), [0, 0, 0, 1, 0, 0, 0, 3]);
    }

    #[test]
    fn an_inline_over_the_limit_is_no_failure_by_itself() {
        let mut encoder = encoder();
        encoder.set_limit(8);
        let xdrs = encoder.xdr();
        assert!(inline(xdrs, 12).is_none() && putlong(xdrs, 1));
        assert_eq!(encoder.finish().unwrap().into_body()[..], [0, 0, 0, 1]);
    }

    #[test]
    fn encoding_inline_gives_no_misaligned_words() {
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        assert!(putbytes(xdrs, b"abc") && inline(xdrs, 4).is_none() && getpos(xdrs) == 3);
        assert!(putbytes(xdrs, b"d") && inline(xdrs, 4).is_some() && getpos(xdrs) == 8);
    }

    #[test]
    fn a_message_of_no_bytes_has_none() {
        for pieces in [&[][..], &[&[][..]], &[&[][..], &[]]] {
            let mut decoder = decoder(pieces);
            let xdrs = decoder.xdr();
            assert!(getlong(xdrs).is_none() && inline(xdrs, 4).is_none() && getbytes(xdrs, 0).is_some());
            assert!(setpos(xdrs, 0) && !setpos(xdrs, 1) && getpos(xdrs) == 0);
        }
        assert!(encoder().finish().unwrap().into_body().is_empty());
    }

    #[test]
    fn positions_and_lengths_up_to_the_last_u32_do_not_overflow() {
        const MAX: c_uint = u32::MAX;
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 1) && putlong(xdrs, 2));
        for n in [MAX, MAX - 1, MAX - 4096, MAX - 4095, MAX - 7] {
            // SAFETY: the length is refused before a byte is read.
            assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, c"".as_ptr(), n) }, FALSE);
            assert!(inline(xdrs, n as usize).is_none());
            assert!(!setpos(xdrs, n));
        }
        assert!(!setpos(xdrs, 8 + 4097) && setpos(xdrs, 8));
        encoder.set_limit(usize::MAX);
        assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::TooLong);

        let mut decoder = decoder(&[&[0; 4], &[0; 4]]);
        let xdrs = decoder.xdr();
        assert_eq!(getlong(xdrs), Some(0));
        let mut byte: c_char = 7;
        for n in [MAX, MAX - 1, MAX - 3, 5] {
            // SAFETY: the length is refused before a byte is written.
            assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, &mut byte, n) }, FALSE);
            assert!(inline(xdrs, n as usize).is_none());
            assert!(!setpos(xdrs, n + 4 * u32::from(n == 5)));
        }
        assert_eq!((byte, getpos(xdrs), decoder.remaining()), (7, 4, 4));
        assert!(setpos(xdrs, 8) && getlong(xdrs).is_none() && getpos(xdrs) == 8);
    }

    #[test]
    fn longs_use_their_low_32_bits_and_come_back_extended_by_zero() {
        for (long, word) in [(-1, u32::MAX), (0xffff_ffff, u32::MAX), (0x1_0000_0001, 1), (c_long::MIN, 0)] {
            let message = on_encoder(|xdrs| assert!(putlong(xdrs, long)));
            assert_eq!(message, word.to_be_bytes());
            assert_eq!(getlong(decoder(&[&message]).xdr()), Some(c_long::from(word)));
        }
    }

    #[test]
    fn null_for_data_is_refused_unless_it_is_empty() {
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        // SAFETY: no byte is read from NULL.
        assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, ptr::null(), 0) }, TRUE);
        // SAFETY: what the test is about.
        assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, ptr::null(), 1) }, FALSE);
        assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::Encode);
        let mut decoder = decoder(&[&[1; 8]]);
        let xdrs = decoder.xdr();
        // SAFETY: no byte is written to NULL.
        assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, ptr::null_mut(), 0) }, TRUE);
        // SAFETY: what the test is about.
        assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, ptr::null_mut(), 1) }, FALSE);
        assert_eq!((decoder.position(), decoder.copied()), (0, 0));
    }

    #[test]
    fn decoding_inline_gives_whole_aligned_ranges_of_one_source() {
        let words: Vec<u8> = (0..24).collect();
        let region = Region::copy_from(&words).unwrap();
        let sources = [(0, 8), (9, 8), (16, 8)].map(|(at, len)| region.slice(at, len));
        let mut decoder = Decoder::new(sources.into_iter().collect());
        let xdrs = decoder.xdr();
        assert!(inline(xdrs, 12).is_none(), "over the end of a source");
        assert_eq!(inline(xdrs, 8).unwrap(), &words[..8]);
        assert!(inline(xdrs, 4).is_none(), "not aligned");
        assert_eq!(getbytes(xdrs, 8).unwrap(), words[9..17]);
        assert_eq!(inline(xdrs, 8).unwrap(), &words[16..]);
        assert!(inline(xdrs, 4).is_none(), "over the end");
        assert_eq!(decoder.copied(), 8);
    }

    #[test]
    fn streams_refuse_the_operations_of_the_other_direction_and_outlive_a_destroy() {
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 5) && setpos(xdrs, 0));
        assert!(getlong(xdrs).is_none() && getbytes(xdrs, 4).is_none());
        assert!(ops(xdrs).control.is_none());
        // SAFETY: a live handle.
        unsafe { ops(xdrs).destroy.unwrap()(xdrs) };
        assert!(putlong(xdrs, 6));
        assert_eq!(encoder.finish().unwrap().into_body()[..], [0, 0, 0, 6]);
        let mut decoder = decoder(&[&[0, 0, 0, 6]]);
        let xdrs = decoder.xdr();
        assert!(!putlong(xdrs, 5) && !putbytes(xdrs, b"abcd"));
        // SAFETY: a live handle.
        unsafe { ops(xdrs).destroy.unwrap()(xdrs) };
        assert_eq!(getlong(xdrs), Some(6));
    }

    #[test]
    fn freeing_runs_the_procedure_on_a_stream_that_refuses_everything() {
        unsafe extern "C-unwind" fn curious(xdrs: *mut XDR, object: *mut c_void) -> c_int {
            // SAFETY: a live handle.
            assert_eq!(unsafe { (*xdrs).x_op }, op::FREE);
            assert!(!putlong(xdrs, 1) && getlong(xdrs).is_none() && inline(xdrs, 0).is_none());
            assert!(!putbytes(xdrs, b"a") && getbytes(xdrs, 1).is_none());
            assert!(getpos(xdrs) == 0 && !setpos(xdrs, 0));
            // SAFETY: the test passes a counter.
            unsafe { *object.cast::<u32>() += 1 };
            TRUE
        }
        let mut calls = 0u32;
        // SAFETY: the procedure fits the object.
        unsafe { free(Some(curious), (&raw mut calls).cast()) };
        // SAFETY: NULL is allowed.
        unsafe { free(None, ptr::null_mut()) };
        assert_eq!(calls, 1);
    }

    #[test]
    fn random_operations_behave_as_on_a_plain_vector() {
        for seed in 1..=60u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut encoder = encoder();
            let xdrs = encoder.xdr();
            let (mut model, mut at) = (Vec::<u8>::new(), 0);
            let put = |model: &mut Vec<u8>, at: &mut usize, bytes: &[u8]| {
                model.resize(model.len().max(*at + bytes.len()), 0);
                model[*at..*at + bytes.len()].copy_from_slice(bytes);
                *at += bytes.len();
            };
            for _ in 0..300 {
                let n = xorshift(&mut random) % 700;
                let bytes: Vec<u8> = (0..n).map(|_| xorshift(&mut random) as u8).collect();
                match xorshift(&mut random) % 6 {
                    0 => {
                        assert!(putlong(xdrs, n as c_long));
                        put(&mut model, &mut at, &(n as u32).to_be_bytes());
                    }
                    1 | 2 => {
                        assert!(putbytes(xdrs, &bytes));
                        put(&mut model, &mut at, &bytes);
                    }
                    3 => match inline(xdrs, n) {
                        Some(there) => {
                            let known = (model.len() - at).min(n);
                            assert_eq!(there[..known], model[at..at + known]);
                            assert!(there[known..].iter().all(|&byte| byte == 0));
                            there.copy_from_slice(&bytes);
                            put(&mut model, &mut at, &bytes);
                        }
                        None => assert_ne!(at % 4, 0),
                    },
                    4 => {
                        at = xorshift(&mut random) % (model.len() + 9);
                        assert!(setpos(xdrs, at as c_uint));
                        model.resize(model.len().max(at), 0);
                    }
                    _ => {
                        assert!(setpos(xdrs, model.len() as c_uint));
                        at = model.len();
                    }
                }
                assert_eq!(getpos(xdrs) as usize, at);
            }
            assert!(setpos(xdrs, model.len() as c_uint));
            assert_eq!(encoder.finish().unwrap().into_body()[..], model);

            let mut rest = &model[..];
            let mut pieces = Vec::new();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at((xorshift(&mut random) % 3000).min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            let mut decoder = decoder(&pieces);
            let xdrs = decoder.xdr();
            let mut at = 0;
            for _ in 0..300 {
                let n = xorshift(&mut random) % 700;
                match xorshift(&mut random) % 4 {
                    0 => {
                        let word = model[at..].first_chunk().map(|b| c_long::from(u32::from_be_bytes(*b)));
                        assert_eq!(getlong(xdrs), word);
                        at += word.map_or(0, |_| 4);
                    }
                    1 => {
                        let there = model.get(at..at + n).map(<[u8]>::to_vec);
                        assert_eq!(getbytes(xdrs, n), there);
                        at += there.map_or(0, |_| n);
                    }
                    2 => {
                        if let Some(there) = inline(xdrs, n) {
                            assert_eq!(there, &model[at..at + n]);
                            at += n;
                        }
                    }
                    _ => {
                        let to = xorshift(&mut random) % (model.len() + 9);
                        assert_eq!(setpos(xdrs, to as c_uint), to <= model.len());
                        at = if to <= model.len() { to } else { at };
                    }
                }
                assert_eq!((getpos(xdrs) as usize, decoder.remaining()), (at, model.len() - at));
            }
        }
    }
}
