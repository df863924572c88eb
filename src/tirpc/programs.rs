//! The programs that are registered with libtirpc, whose own list is not accessible from outside.
#![forbid(unsafe_code)]

use crate::fork;
use crate::tirpc::{SVCXPRT, svc_req};

/// A dispatch routine.
pub type Dispatch = unsafe extern "C" fn(*mut svc_req, *mut SVCXPRT);

/// A program's dispatch routine with what is kept while it runs, or the range of the versions that are registered.
pub type Found<R> = Result<(Dispatch, R), Option<(u32, u32)>>;

/// A registered program. The latest is last in the list.
#[derive(Clone, Copy)]
struct Registered {
    program: u32,
    version: u32,
    dispatch: Dispatch,
}

static REGISTERED: fork::Lock<Vec<Registered>> = fork::Lock::new();

/// libtirpc has registered the program.
pub fn registered(program: u32, version: u32, dispatch: Dispatch) {
    let mut all = REGISTERED.lock();
    let same = |it: &Registered| {
        (it.program, it.version) == (program, version) && std::ptr::fn_addr_eq(it.dispatch, dispatch)
    };
    // Called once for each netid.
    if !all.iter().any(same) {
        all.push(Registered { program, version, dispatch });
    }
}

/// libtirpc no longer knows the program.
pub fn unregistered(program: u32, version: u32) {
    REGISTERED.lock().retain(|it| (it.program, it.version) != (program, version));
}

/// The dispatch routine of a program, or the range of its registered versions.
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
