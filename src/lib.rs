//! RPC-over-RDMA for existing ONC RPC programs.
//!
//! ```text
//!  C:  clnt_call(...)            svc_run()               rpcrdma_*()
//!        |                         |                        |
//!   tirpc/client          tirpc/transport, server         capi
//!        +------------+------------+------------------------+
//!   xdr  <-           driver                 runs the program's xdrproc over a segment list: a Message
//!     |- connection   a Message, its binding and the peer's limits -> a plan -> header bytes, and back
//!     '- provider     posts it to a device, and polls that
//! ```
//!
//! Data goes down in one pass; results come up as completions of the device, which the engine turns into the end of a call or a
//! request. Every module has its row here, and uses only modules of rows below its own (`tests/layers.rs` reads this):
//!
//! ```text
//! fuzz, tool                     what fuzz/ and tool/ reach; not in the C library
//! capi                           the functions of include/rpcrdma.h: guard, convert, map errors
//! tirpc                          libtirpc's boundary: its CLIENTs, transports, netids, and what is interposed
//! driver                         joins an engine and a device, and waits for both
//! connection                     the engine, without input and output: XIDs, credits, both directions, errors, versions
//! xdr                            an XDR stream over a segment list
//! provider                       a connected queue pair, and the devices that have one
//! socket                         sockets, which the software device and the driver use
//! memory                         what messages lie in, what is lent by the program, and what peers make us hold
//! wire                           header bytes: both versions, characteristics, the private data of a connection
//! config                         what is set
//! fork, per_thread               what a process shares with its children, and locks that no fork leaves held; what a thread owns
//! binding, ffi                   what may be placed directly; the guard around each C function
//! log, stats, textfile, wait     words for people, counters, files of settings; poll(2), epoll, timers
//! unwind                         the unwinder, which is loaded late
//! reserve                        memory for when the system has none left
//! error, process, signals, sync, thread
//! ```
//!
//! - Nothing below `tirpc` knows that libtirpc exists, and nothing above `provider` knows a device by name: `driver::start`
//!   chooses among them by what they can do.
//! - `connection`, `binding` and `wire` read no clock, no socket and no raw pointer.
//! - The driver waits for connections. Other code waits in few places: a device for its own hardware, for at most a second,
//!   when memory has to be taken back; and whatever asks rpcbind.
//!
//! The C library is this crate's staticlib, linked by `make` with a version script.

pub mod binding;
pub mod capi;
pub mod config;
mod connection;
mod driver;
mod error;
mod ffi;
mod fork;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod log;
mod memory;
mod per_thread;
mod process;
pub mod provider;
mod reserve;
mod signals;
mod socket;
mod stats;
mod sync;
mod textfile;
mod thread;
mod tirpc;
#[cfg(feature = "tool")]
pub mod tool;
mod unwind;
mod wait;
pub mod wire;
mod xdr;
