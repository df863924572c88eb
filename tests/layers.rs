//! Rules about the source that no compiler checks: who may use whom, and how a C function starts.

use std::fs;
use std::path::{Path, PathBuf};

/// From the bottom up; a module uses only modules of rows above its own in this table, and itself.
const LAYERS: &[&[&str]] = &[
    &["error", "process", "signals", "thread"],
    &["log", "stats", "textfile", "wait"],
    &["binding", "ffi"],
    &["config", "fork", "memory", "wire"],
    &["socket"],
    &["provider"],
    &["connection", "xdr"],
    &["driver"],
    &["tirpc"],
    &["capi"],
];

fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![root];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("src is readable") {
            let path = entry.expect("src is readable").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source is text");
                sources.push((path, text));
            }
        }
    }
    assert!(sources.len() > 10, "the sources were not found");
    sources
}

/// The module directly under the crate in which a file lies.
fn module(path: &Path) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let first = path.strip_prefix(root).expect("under src").iter().next().expect("a name");
    first.to_string_lossy().trim_end_matches(".rs").to_owned()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

/// The modules that a source names as `crate::name`, in code that is not for tests only.
fn used(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    code.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split("crate::").skip(1).filter(move |_| !line.contains("$crate")))
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn a_module_uses_only_modules_below_it() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let module = module(&path);
        if module == "lib" {
            continue;
        }
        let Some(own) = layer(&module) else {
            wrong.push(format!("{} has no place in LAYERS", path.display()));
            continue;
        };
        for name in used(&text) {
            // Macros and the words of the log are at the top of the crate.
            if name.starts_with("log_") || name == module {
                continue;
            }
            match layer(name) {
                Some(other) if other < own => {}
                _ => wrong.push(format!("{} uses crate::{name}", path.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Above `provider` a device is what its traits say; the words of the configuration for devices are strings.
#[test]
fn nothing_above_the_providers_names_a_device() {
    let devices = ["iwarp", "verbs"];
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        // Tests connect real devices to each other.
        if module(&path) == "provider" || path.ends_with("driver/load.rs") {
            continue;
        }
        let code = text.split("mod tests {").next().unwrap_or(&text);
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            // What stands in quotation marks is for people.
            let code: String = line.split('"').step_by(2).collect();
            let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
            if words.map(str::to_lowercase).any(|word| devices.contains(&&*word)) {
                wrong.push(format!("{}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_c_function_starts_with_the_guard() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (path, text) in sources() {
        // What takes the place of rdma-core in tests is not called by programs.
        if path.ends_with("verbs/mock.rs") {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(&text);
        let pieces = |abi: &str| code.split(&format!("extern \"{abi}\" fn ")).skip(1).collect::<Vec<_>>();
        let guarded = |start: &str| {
            ["guard(", "ffi::guard(", "guard_passing("].iter().any(|name| start.starts_with(name))
        };
        // What is of the type of a function that may unwind need not do so.
        let passing = |start: &str| {
            let names =
                ["guard_in_steps(", "guard_in_steps_cancellable(", "guard_passing_in_steps_cancellable("];
            guarded(start) || start.starts_with("guard_around(") || names.iter().any(|n| start.starts_with(n))
        };
        let plain = pieces("C").into_iter().map(|piece| (piece, false));
        for (piece, unwinds) in plain.chain(pieces("C-unwind").into_iter().map(|piece| (piece, true))) {
            // A type is written `extern "C" fn(`.
            let name: String = piece.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let Some((_, body)) = piece.split_once("{\n") else { continue };
            let start = body.lines().map(str::trim).find(|line| !line.starts_with("//")).unwrap_or("");
            seen += 1;
            if !(if unwinds { passing(start) } else { guarded(start) }) {
                wrong.push(format!("{}: {name} starts with {start:?}", path.display()));
            }
        }
    }
    assert!(seen > 20, "only {seen} C functions were found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
