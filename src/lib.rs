//! RPC-over-RDMA for existing ONC RPC programs.
//!
//! ```text
//!  C:  clnt_call(...)            svc_run()               rpcrdma_*()
//!        |                         |                        |
//!   tirpc/client              tirpc/server               capi           ABI only: guard, convert, map errors
//!        +------------+------------+------------------------+
//!   xdr               runs the program's xdrproc over a segment list
//!   driver            submits messages; the only clock, fd and blocking wait; joins the two columns below
//!     |- connection   sans-I/O engine: XIDs, credits, both directions, errors, versions
//!     |    |- chunks  message + binding + peer limits -> plan: inline | Read | Write | Reply chunk, and its inverse
//!     |    |- two, characteristics   which version is spoken; what both ends tell each other in Version Two
//!     |    '- wire    plan <-> header bytes
//!     |- binding      which items of which procedures may be placed
//!     '- memory, provider -> provider/{iwarp, verbs}     the device
//!   socket, wait, signals, thread, fork, process   what the system calls of the process are asked for, checked
//! ```
//!
//! A module uses only modules below it. Nothing below `tirpc` knows that libtirpc exists; nothing above `provider`
//! knows which device moves the bytes; `connection`, `binding` and `wire` read no clock, no socket and no raw pointer.
//!
//! The C library is this crate's staticlib, linked by `make` with a version script.

pub mod binding;
pub mod capi;
pub mod config;
pub mod connection;
pub mod driver;
pub mod error;
pub mod ffi;
pub mod fork;
pub mod log;
pub mod memory;
pub mod process;
pub mod provider;
pub mod signals;
pub mod socket;
pub mod stats;
pub mod textfile;
pub mod thread;
pub mod tirpc;
pub mod wait;
pub mod wire;
pub mod xdr;
