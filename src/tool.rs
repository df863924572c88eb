//! What the command `rpcrdma` (`tool/`) can reach of modules that are invisible outside this crate. Only with the feature
//! `tool`, with which the C library is never built: there is no contract here. The command contains its own copy of the
//! library, which stands for the installed one if both have the same version.

pub use crate::driver::Agreed;
pub use crate::error::{Error, Kind};
pub use crate::tirpc::netid::Row;

pub mod caller;
pub mod host;

pub use crate::stats::{HELP as COUNTER_HELP, NAMES as COUNTERS, latency, layout};

/// The version of this library.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// libtirpc as a server calls it, with this library in front: for `rpcrdma perf`.
pub mod rpc {
    pub use crate::stats::snapshot as counters;
    pub use crate::tirpc::interpose::{getnetconfigent, svc_reg, svc_run, svc_tli_create};
    pub use crate::tirpc::{SVCXPRT, bool_t, svc_req};
    pub use crate::xdr::{XDR, XdrProc};
}
