//! docs/rules.md keeps its promises: every rule that a comment cites is there, and whatever its rows name exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

/// Rows without a test, and why there is none.
const UNTESTED: &[(&str, &str)] = &[
    ("4", "no connection changes over to RDMA"),
    ("68", "not done, as the row says"),
    ("72", "about extensions, which there are none of"),
    ("122", "needs channel bindings, which there are none of"),
    ("150", "advice to authors of specifications"),
    ("157", "about extensions, which there are none of"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below a folder, with their paths from the project's root.
fn files(folder: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of the project") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let name = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
                found.insert(name, text);
            }
        }
    }
    assert!(found.len() > 5, "{folder:?}: the files were not found");
    found
}

/// A row of a table on the page.
struct Row {
    number: String,
    kept: String,
    test: String,
}

fn rows() -> Vec<Row> {
    let page = fs::read_to_string(root().join("docs/rules.md")).expect("docs/rules.md");
    let mut rows = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| number")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [number, rule, source, kept, test] = cells[..] else { panic!("not five cells: {line}") };
        assert!(!rule.is_empty() && !source.is_empty() && !kept.is_empty(), "an empty cell: {line}");
        rows.push(Row { number: number.to_owned(), kept: kept.to_owned(), test: test.to_owned() });
    }
    rows
}

/// The pieces of a cell that are marked as code.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The numbers after each "rule " and "rules " of a text, and in each `rule_58_` and `rules_58_and_156_` of a name.
fn cited(text: &str) -> BTreeSet<u32> {
    let mut numbers = BTreeSet::new();
    for (at, _) in text.match_indices("rule") {
        // "§7.1.2 rule 4" is a rule of that section.
        let before = text[..at].rsplit(char::is_whitespace).nth(1).unwrap_or("");
        let rest = text[at + 4..].trim_start_matches('s');
        let Some(mut rest) = rest.strip_prefix([' ', '_']) else { continue };
        while let Some(end) = rest.find(|c: char| !c.is_ascii_digit()).filter(|end| *end > 0) {
            if !before.starts_with('§') {
                numbers.insert(rest[..end].parse().expect("a number"));
            }
            rest = &rest[end..];
            let next = [", ", " and ", "_and_"].iter().find_map(|between| rest.strip_prefix(between));
            rest = next.unwrap_or("");
        }
    }
    numbers
}

fn has(text: &str, before: &str, name: &str) -> bool {
    text.match_indices(&format!("{before}{name}"))
        .any(|(at, found)| !text[at + found.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[test]
fn every_rule_that_is_cited_has_a_row() {
    let numbers: Vec<String> = rows().into_iter().map(|row| row.number).collect();
    let expected = (1..=157).map(|n| n.to_string()).chain((1..=11).map(|n| format!("P{n}")));
    assert!(
        numbers.iter().eq(expected.collect::<Vec<_>>().iter()),
        "rows are missing or in disorder: {numbers:?}"
    );
    let mut missing = Vec::new();
    let mut seen = BTreeSet::new();
    for (path, text) in ["src", "tests", "c-tests"].into_iter().flat_map(files) {
        // This file is about the citations; the tests of the private data use the numbers of a table of their own.
        let prefix = match &path[..] {
            "tests/rules.rs" => continue,
            "src/wire/private_data.rs" => "P",
            _ => "",
        };
        for number in cited(&text) {
            let number = format!("{prefix}{number}");
            if !numbers.contains(&number) {
                missing.push(format!("{path} cites rule {number}"));
            }
            seen.insert(number);
        }
    }
    assert!(seen.len() > 100, "only {} cited rules were found", seen.len());
    assert!(missing.is_empty(), "docs/rules.md has no row: {missing:#?}");
}

#[test]
fn what_keeps_a_rule_exists() {
    let sources = files("src");
    let mut wrong = Vec::new();
    for Row { number, kept, .. } in rows() {
        let mut file = None;
        for name in code(&kept) {
            if name.ends_with(".rs") {
                file = sources.get(&format!("src/{name}"));
                if file.is_none() {
                    wrong.push(format!("rule {number}: there is no src/{name}"));
                }
            } else if let Some(text) = file
                && !["fn ", "struct ", "enum ", "const "].iter().any(|kind| has(text, kind, name))
            {
                wrong.push(format!("rule {number}: its file has no {name}"));
            }
        }
        if file.is_none() && !kept.starts_with("not ours: ") && !kept.starts_with("nothing: ") {
            wrong.push(format!("rule {number}: kept by what?"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_tests_of_a_rule_exist() {
    let (sources, scripts, programs) = (files("src"), files("tests"), files("c-tests"));
    let is_test = |text: &String, name: &str| {
        has(text, "fn ", name) && text.split(&format!("fn {name}(")).next().is_some_and(is_marked)
    };
    let mut wrong = Vec::new();
    for Row { number, test, .. } in rows() {
        let mut any = false;
        for name in code(&test) {
            any = true;
            let found = match name.contains('/') {
                // A script says which rules it checks.
                true => scripts
                    .get(name)
                    .is_some_and(|text| number.parse().is_ok_and(|number| cited(text).contains(&number))),
                false => {
                    sources.values().chain(scripts.values()).any(|text| is_test(text, name))
                        || programs.values().any(|text| has(text, "static void ", name))
                }
            };
            if !found {
                wrong.push(format!("rule {number}: there is no test {name}"));
            }
        }
        if any == UNTESTED.iter().any(|(untested, _)| *untested == number) || !any && test != "none" {
            wrong.push(format!("rule {number}: a test, or a reason in UNTESTED why there is none"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_tests_that_the_page_on_security_names_exist() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("docs/security.md");
    let (sources, scripts) = (files("src"), files("tests"));
    let (mut named, mut wrong) = (0, Vec::new());
    for line in page.lines().filter(|line| line.starts_with("| §")) {
        let tests =
            line.trim_matches('|').split('|').nth(2).unwrap_or_else(|| panic!("not three cells: {line}"));
        for name in code(tests) {
            named += 1;
            let exists = match name.contains('/') {
                true => scripts.contains_key(name),
                false => sources.values().any(|text| {
                    has(text, "fn ", name) && text.split(&format!("fn {name}(")).next().is_some_and(is_marked)
                }),
            };
            if !exists {
                wrong.push(name.to_owned());
            }
        }
    }
    assert!(named > 20 && wrong.is_empty(), "{named} are named; there is no {wrong:#?}");
}

/// `make check-planted` takes long, and is not run with each change: without this test they would go stale unnoticed.
#[test]
fn planted_defects_can_be_planted() {
    let patches = files("tests/planted");
    let mut wrong = Vec::new();
    for path in patches.keys() {
        let mut patch = Command::new("patch");
        patch.args(["-p1", "--dry-run", "--force", "--silent", "-i", path]).current_dir(root());
        match patch.output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return println!("skip: patch(1) is not installed");
            }
            Err(error) => panic!("patch: {error}"),
            Ok(done) if !done.status.success() => wrong.push(path),
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "they do not apply any more: {wrong:#?}");
}

/// Whether the text before a function marks it as a test.
fn is_marked(before: &str) -> bool {
    before.lines().rev().take(4).any(|line| line.trim() == "#[test]")
}
