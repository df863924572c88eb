//! The SVCXPRT of a connection over RDMA.
#![allow(unsafe_code)]

use crate::tirpc::SVCXPRT;

/// Gives an accepted stock connection the operations that look at its first byte.
///
/// `rdma_only`: it came in on a listener of netid "rdma", where nothing else is spoken.
///
/// # Safety
/// `xprt` is a live, registered connection of libtirpc's stream transport.
pub unsafe fn watch(_xprt: *mut SVCXPRT, _rdma_only: bool) {}
