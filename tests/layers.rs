//! Rules about the source that no compiler checks: which module may use which, and how a C function starts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that belong together, and so may use each other, each with the reason. Everywhere else, files of the same folder
/// have an order.
const TOGETHER: &[(&str, &[&str])] = &[
    ("driver", &["backlog", "link"]), // The link; its queue of what is not sent.
    ("driver", &["busy", "server"]),  // A connection, and the loop that looks at busy ones.
    ("driver", &["callback", "client", "renewal", "start"]), // The connection of the end that opens it.
    ("provider", &["iwarp", "local"]), // Shared memory is another stream of software iWARP.
    ("provider::verbs", &["cm", "library", "mock", "queues"]), // The mock takes the place of what it is called by.
    ("tirpc", &["adapters", "beside", "interpose"]),           // Interposed functions, and what they lead to.
    // A CLIENT that serves, a transport that calls, and threads that the transport gives its requests to.
    ("tirpc", &["callback", "client", "threads", "transport"]),
    ("wire", &["header", "v1", "v2"]), // The header, and its codecs.
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

/// The path of a file's module, from the top of the crate.
fn module(path: &Path) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let path = path.strip_prefix(root).expect("under src").with_extension("");
    path.iter().map(|part| part.to_string_lossy().into_owned()).collect()
}

/// Whether a file is part of the tests of a module.
fn is_of_tests(path: &Path) -> bool {
    module(path).iter().any(|part| part == "tests")
}

/// The part of a source that goes into the library.
fn code(text: &str) -> String {
    let end = ["mod tests {", "pub(super) mod tests {"]
        .iter()
        .filter_map(|start| text.find(&format!("#[cfg(test)]\n{start}")));
    let text = &text[..end.min().unwrap_or(text.len())];
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Collects the paths that begin here: several, if there are braces. Returns what follows.
fn paths<'a>(mut text: &'a str, found: &mut Vec<Vec<String>>) -> &'a str {
    let mut path: Vec<String> = Vec::new();
    loop {
        text = text.trim_start();
        if let Some(rest) = text.strip_prefix('{') {
            text = rest.trim_start();
            while !text.starts_with('}') && !text.is_empty() {
                let mut inner = Vec::new();
                let rest = paths(text, &mut inner);
                found.extend(inner.into_iter().map(|tail| [path.clone(), tail].concat()));
                // A new name, a comma, or something that is not a path.
                text = rest.trim_start_matches(|c: char| !matches!(c, '{' | '}') && !c.is_alphabetic());
                if let Some(renamed) = text.strip_prefix("as ") {
                    text = renamed.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
                    text = text.trim_start_matches([',', ' ', '\n']);
                }
            }
            return text.strip_prefix('}').unwrap_or(text);
        }
        let name: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        text = &text[name.len()..];
        if !name.is_empty() {
            path.push(name);
        }
        match text.strip_prefix("::") {
            Some(rest) if !path.is_empty() => text = rest,
            _ => {
                found.push(path);
                return text;
            }
        }
    }
}

/// The modules that each module uses, by whatever path.
fn uses() -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let sources: Vec<_> = sources().into_iter().map(|(path, text)| (module(&path), code(&text))).collect();
    let modules: BTreeSet<_> = sources.iter().map(|(module, _)| module.clone()).collect();
    let mut uses: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (module, code) in &sources {
        if module[0] == "lib" || module.iter().any(|name| name == "tests") {
            continue;
        }
        let own = uses.entry(module.clone()).or_default();
        for start in ["crate::", "super::"] {
            for (at, _) in code.match_indices(start) {
                let before = code[..at].chars().next_back().unwrap_or(' ');
                if before.is_alphanumeric() || matches!(before, ':' | '$' | '_') {
                    continue;
                }
                let mut found = Vec::new();
                paths(&code[at..], &mut found);
                for path in found {
                    let ups = path.iter().take_while(|name| *name == "super").count();
                    let base = if ups == 0 { &[][..] } else { &module[..module.len().saturating_sub(ups)] };
                    let full = [base, &path[ups.max(1)..]].concat();
                    // What is in no module of the crate is at its top: macros.
                    let known =
                        (1..=full.len()).rev().map(|n| full[..n].to_vec()).find(|m| modules.contains(m));
                    own.extend(known.filter(|known| known != module));
                }
            }
        }
    }
    assert!(uses.values().map(BTreeSet::len).sum::<usize>() > 200, "the uses were not found");
    uses
}

/// The rows of the picture in lib.rs, from the bottom up.
fn picture() -> Vec<Vec<String>> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).expect("lib.rs");
    let rows =
        text.split("//! ```text\n").nth(2).expect("two pictures").split("//! ```").next().expect("an end");
    let row = |line: &str| {
        let names = line.trim_start_matches("//!").trim().split("  ").next().unwrap_or("");
        names.split(", ").map(str::to_owned).collect()
    };
    rows.lines().map(row).rev().collect()
}

#[test]
fn a_module_uses_only_modules_below_it_in_the_picture() {
    let picture = picture();
    let row = |module: &str| picture.iter().position(|row| row.iter().any(|name| name == module));
    let mut wrong = Vec::new();
    for (path, _) in sources() {
        let name = &module(&path)[0];
        if name != "lib" && row(name).is_none() {
            wrong.push(format!("{name} is not in the picture"));
        }
    }
    for (module, used) in uses() {
        for other in used.iter().filter(|other| other[0] != module[0]) {
            if row(&other[0]) >= row(&module[0]) {
                wrong.push(format!("{} uses {}", module.join("::"), other.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn files_beside_each_other_have_an_order_or_are_one_thing() {
    // For each folder: which of its modules uses which.
    let mut beside: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, used) in uses() {
        for other in used {
            let same = module.iter().zip(&other).take_while(|(a, b)| a == b).count();
            if same < module.len() && same < other.len() {
                let folder = beside.entry(module[..same].to_vec()).or_default();
                folder.entry(module[same].clone()).or_default().insert(other[same].clone());
            }
        }
    }
    let mut found = BTreeSet::new();
    for (folder, uses) in &beside {
        for name in uses.keys() {
            let (mut reached, mut left) = (BTreeSet::new(), vec![name]);
            while let Some(next) = left.pop() {
                left.extend(uses.get(next).into_iter().flatten().filter(|to| reached.insert((*to).clone())));
            }
            let back = |other: &&String| {
                let (mut seen, mut left) = (BTreeSet::new(), vec![*other]);
                while let Some(next) = left.pop() {
                    left.extend(uses.get(next).into_iter().flatten().filter(|to| seen.insert((*to).clone())));
                }
                seen.contains(name)
            };
            let circle: BTreeSet<String> = reached.iter().filter(back).cloned().collect();
            if !circle.is_empty() {
                found.insert((folder.join("::"), circle.into_iter().collect::<Vec<_>>()));
            }
        }
    }
    let allowed = TOGETHER.iter().map(|(folder, names)| {
        ((*folder).to_owned(), names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    });
    assert_eq!(found, allowed.collect());
}

/// Above `provider` a device is what its traits say; only the configuration's words for devices name one, and they are
/// strings.
#[test]
fn nothing_above_the_providers_names_a_device() {
    let devices = ["iwarp", "verbs"];
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        // Tests connect real devices to each other, and fuzz targets reach into them.
        let excepted = ["provider", "fuzz"].contains(&&*module(&path)[0]) || path.ends_with("driver/load.rs");
        if excepted || is_of_tests(&path) {
            continue;
        }
        let code = text.split("mod tests {").next().unwrap_or(&text);
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            // What is in quotation marks is for people.
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
        // Programs do not call what takes the place of rdma-core in tests.
        if path.ends_with("verbs/mock.rs") || is_of_tests(&path) {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(&text);
        let pieces = |abi: &str| code.split(&format!("extern \"{abi}\" fn ")).skip(1).collect::<Vec<_>>();
        let guarded = |start: &str| {
            ["guard(", "ffi::guard(", "guard_passing("].iter().any(|name| start.starts_with(name))
        };
        // A function of a type that may unwind need not do so.
        let passing = |start: &str| {
            let names = [
                "guard_in_steps(",
                "guard_in_steps_cancellable(",
                "guard_passing_in_steps(",
                "guard_passing_in_steps_cancellable(",
            ];
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
