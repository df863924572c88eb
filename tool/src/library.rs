//! The library that a program would get: `rpcrdma-run` knows it, and is asked.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A variable for `rpcrdma-run`, not a setting: the library would report it as a misspelt setting.
pub const NAMED: &str = "RPCRDMA_LIB";

/// The environment of a program that `rpcrdma-run` runs.
pub fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    env::vars_os().filter(|(name, _)| name != NAMED)
}

/// Removes that variable from this process's own environment, for the library's part in this process.
///
/// To be called before there is another thread.
#[allow(unsafe_code)]
pub fn forget_name() {
    // SAFETY: no other thread runs yet, so nobody reads the environment meanwhile.
    unsafe { env::remove_var(NAMED) };
}

/// `rpcrdma-run`: the one beside this program, where both were built or installed, or else in the PATH.
pub fn runner() -> Result<PathBuf, String> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.join("rpcrdma-run")));
    let path = env::var_os("PATH").unwrap_or_default();
    let others = env::split_paths(&path).filter(|folder| folder.is_absolute());
    let others = others.map(|folder| folder.join("rpcrdma-run"));
    let found = beside.iter().cloned().chain(others).find(|path| path.is_file());
    found.ok_or_else(|| {
        let beside = beside.as_deref().and_then(Path::parent).unwrap_or(Path::new("."));
        format!("rpcrdma-run is neither in {} nor in the PATH: it comes with the library", beside.display())
    })
}

/// Version and path of the library that programs get, as `rpcrdma-run --version` says.
pub fn found() -> Result<(String, PathBuf), String> {
    let runner = runner()?;
    let cannot = |why: &dyn std::fmt::Display| format!("{}: {why}", runner.display());
    let output = Command::new(&runner).arg("--version").output().map_err(|error| cannot(&error))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(text.trim().trim_start_matches("rpcrdma-run: ").to_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines();
    let version = lines.next().and_then(|line| line.strip_prefix("rpcrdma-run "));
    match (version, lines.next()) {
        (Some(version), Some(path)) => Ok((version.to_owned(), path.into())),
        _ => Err(cannot(&"says no version")),
    }
}

/// The names in LD_PRELOAD that are this library's.
pub fn preloads(preload: &OsStr) -> Vec<String> {
    let text = preload.to_string_lossy();
    let names = text.split([' ', ':']).filter(|name| name.rsplit('/').next() == Some("librpcrdma.so.0"));
    names.map(str::to_owned).collect()
}

/// Where the loader finds the library by its name alone; `None`: nowhere.
pub fn known_to_loader() -> Result<Option<String>, String> {
    let tools = ["/sbin/ldconfig", "/usr/sbin/ldconfig"];
    let tool = tools.iter().find(|tool| Path::new(tool).exists()).ok_or("there is no ldconfig")?;
    let output = Command::new(tool).arg("-p").output().map_err(|error| format!("{tool}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.trim_start().starts_with("librpcrdma.so.0 "));
    Ok(line.and_then(|line| line.split(" => ").nth(1)).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_library_is_taken_from_a_preload() {
        let names = preloads(OsStr::new("libx.so:/a/librpcrdma.so.0 librpcrdma.so.0:/b/librpcrdma.so.0.old"));
        assert_eq!(names, ["/a/librpcrdma.so.0", "librpcrdma.so.0"]);
    }
}
