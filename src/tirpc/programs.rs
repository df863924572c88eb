//! The programs that are registered with libtirpc, whose own list nobody else can see.
#![forbid(unsafe_code)]

use crate::fork;
use crate::tirpc::{SVCXPRT, svc_req};

/// A dispatch routine.
pub type Dispatch = unsafe extern "C" fn(*mut svc_req, *mut SVCXPRT);

/// The routine of a program with what is kept while it runs, or the versions that there are of it.
pub type Found<R> = Result<(Dispatch, R), Option<(u32, u32)>>;

/// A program that is registered, latest last.
#[derive(Clone, Copy)]
struct Registered {
    program: u32,
    version: u32,
    dispatch: Dispatch,
}

static REGISTERED: fork::Lock<Vec<Registered>> = fork::Lock::new();

/// libtirpc has registered it.
pub fn registered(program: u32, version: u32, dispatch: Dispatch) {
    let mut all = REGISTERED.lock();
    let same = |it: &Registered| {
        (it.program, it.version) == (program, version) && std::ptr::fn_addr_eq(it.dispatch, dispatch)
    };
    // For each netid once more.
    if !all.iter().any(same) {
        all.push(Registered { program, version, dispatch });
    }
}

/// libtirpc knows it no more.
pub fn unregistered(program: u32, version: u32) {
    REGISTERED.lock().retain(|it| (it.program, it.version) != (program, version));
}

/// The routine of a program, or the versions that there are of it.
pub fn find(program: u32, version: u32) -> Found<()> {
    let all = REGISTERED.lock();
    let named = all.iter().filter(|it| it.program == program);
    // The latest is the first that libtirpc finds.
    if let Some(found) = named.clone().rfind(|it| it.version == version) {
        return Ok((found.dispatch, ()));
    }
    let versions = named.map(|it| it.version);
    Err(versions.clone().min().zip(versions.max()))
}
