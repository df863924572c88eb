//! Hostile peers on real sockets: a server and clients that were compiled against libtirpc alone, with the library
//! preloaded, against frames made by hand.
//!
//! `servers` holds one bad connection per case, while a good client of the same single-threaded server must be served
//! at once, before, during and after; at its end the server has no more descriptors, threads and memory than before.
//! `placement` does so with a server that places data directly, `pulls` with the memory that long calls share.
//! `clients` holds bad servers, for which a C caller must find the right `clnt_stat` and a readable text in time.
//! `soak` has no tests of its own: its clients stand beside honest ones in `make soak`.
//! `two` holds both for Version Two: its offer, its fallback, and its transport characteristics.
//!
//! Needs the built library (build/librpcrdma.so.0, or `LIBRPCRDMA`) and a C compiler, and fails without them. Nothing
//! sleeps: what has been sent is known to be handled when calls of the good client have been answered after it.
//!
//! `TEST_PATIENCE=4` gives every limit of time four times as long; without it they follow the load of the machine.
//!
//! Every day, three corruptions of each byte are tried. `BAD_PEERS=full` tries all 255: `make check-bad-peers`.
#![allow(unsafe_code)]

mod clients;
mod peer;
mod placement;
mod programs;
mod pulls;
mod servers;
mod soak;
mod two;
