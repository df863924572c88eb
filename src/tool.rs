//! What the command `rpcrdma` (`tool/`) reaches of the modules that nobody outside this crate sees. With the feature `tool`
//! only, which the C library is never built with: here is no contract. The command has its own copy of the library in it,
//! which speaks for one that is installed where both are of one version.

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
