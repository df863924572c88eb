//! Hostile peers on real sockets: a server and clients that were compiled against libtirpc alone, with the library
//! preloaded, against handmade frames.
//!
//! `servers` has one bad connection per case, while a good client of the same single-threaded server must be served at once,
//! before, during and after; at its end the server has no more descriptors, threads and memory than before. `placement` does
//! the same with a server that places data directly, `pulls` with the memory that long calls share. `clients` has bad
//! servers, against which a C caller must get the right `clnt_stat` and a readable text in time. `soak` has no tests of its
//! own: its clients run beside honest ones in `make soak`. `two` has both for Version Two: its offer, its fallback, and its
//! transport characteristics.
//!
//! Needs the built library (build/librpcrdma.so.0, or `LIBRPCRDMA`) and a C compiler, and fails without them. Nothing
//! sleeps: what has been sent is known to be handled when later calls of the good client have been answered.
//!
//! `TEST_PATIENCE=4` makes every time limit four times as long; without it the limits follow the load of the machine.
//!
//! By default, three corruptions of each byte are tried. `BAD_PEERS=full` tries all 255: `make check-bad-peers`.
#![allow(unsafe_code)]

mod clients;
mod peer;
mod placement;
mod programs;
mod pulls;
mod servers;
mod soak;
mod two;
