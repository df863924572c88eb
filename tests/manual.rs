//! What is written for users agrees with what the library does: settings, versions, the example, the manual pages.

use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_manual_page_describes_exactly_the_settings_that_there_are() {
    let page = read("docs/rpcrdma.conf.5");
    let mut found: Vec<(String, String)> = Vec::new();
    let mut open = false;
    for line in page.lines() {
        match (line.strip_prefix(".It Cm "), line.starts_with('.'), found.last_mut()) {
            (Some(item), _, _) => {
                found.push((item.to_owned(), String::new()));
                open = true;
            }
            (None, false, Some((_, meaning))) if open => meaning.push_str(line),
            _ => open = false,
        }
    }
    let wanted: Vec<(String, String)> = rpcrdma::config::table()
        .map(|(env, key, default, meaning)| {
            let default = if default.is_empty() { "none" } else { default };
            (format!("{key} Pq Ev {env} , No default Dq {default}"), format!("{meaning}."))
        })
        .collect();
    assert_eq!(found, wanted);
}

#[test]
fn the_example_file_has_exactly_the_settings_that_there_are_with_their_defaults() {
    let file = "packaging/rpcrdma.conf";
    let example = read(file);
    let (head, settings) = example.split_once("\n\n").expect("a head, and settings");
    assert!(head.lines().all(|line| line.starts_with("# ")), "{head}");
    let wanted: Vec<String> = rpcrdma::config::table()
        .map(|(_, key, default, meaning)| format!("# {meaning}\n#{key} = {default}").trim_end().to_owned())
        .collect();
    if std::env::var_os("RPCRDMA_BLESS").is_some_and(|value| value == "1") {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        fs::write(path, format!("{head}\n\n{}\n", wanted.join("\n\n"))).expect(file);
        return;
    }
    let found: Vec<&str> = settings.trim_end().split("\n\n").collect();
    assert_eq!(found, wanted, "RPCRDMA_BLESS=1 cargo test --test manual writes {file} anew");
}

#[test]
fn the_manual_page_of_bindings_has_every_word_and_its_examples_are_understood() {
    let page = read("docs/rpcrdma-bindings.5");
    let registry = rpcrdma::binding::Registry::built_in();
    let examples: Vec<&str> = page
        .split(".Bd ")
        .skip(1)
        .flat_map(|block| block.lines().skip(1).take_while(|l| *l != ".Ed"))
        .collect();
    assert_eq!(examples.len(), 3);
    assert_eq!(registry.add_text("rpcrdma-bindings.5", &examples.join("\n")), [""; 0]);

    // The error for an unknown word lists the known words.
    let words = |line: &str| -> Vec<String> {
        let error = registry.add_text("t", line).concat();
        let (_, list) = error.split_once("must be ").expect("a list");
        let list = list.trim_end_matches(", with commas between").replace(" or ", ", ");
        list.split(", ").map(|word| word.split(['[', '<', '=']).next().expect("a word").to_owned()).collect()
    };
    let lines = ["9 1 1 what", "9 1 1 arguments=what", "9 1 1 results=what"];
    for word in lines.iter().flat_map(|line| words(line)) {
        let tags = page.lines().filter_map(|line| line.strip_prefix(".It Cm "));
        let mut found = tags.flat_map(|tag| tag.split([' ', ',', '[', '<', '=']));
        assert!(found.any(|tag| tag == word), "the page does not describe {word}");
    }
}

#[test]
fn the_example_for_programs_is_the_file_in_examples() {
    let page = read("docs/programming.md");
    let block = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a C block");
    assert_eq!(block, read("examples/hello.c"));
}

#[test]
fn the_newest_entry_of_the_changelog_is_this_version() {
    let changelog = read("CHANGELOG.md");
    let newest = changelog.lines().find_map(|line| line.strip_prefix("## [")).expect("an entry");
    assert!(newest.starts_with(&format!("{}]", env!("CARGO_PKG_VERSION"))), "{newest}");
}

#[test]
fn the_packages_are_of_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let debian = read("debian/changelog");
    assert!(debian.starts_with(&format!("rpcrdma ({version}-")), "{debian}");
    let spec = read("packaging/rpcrdma.spec");
    assert!(spec.lines().any(|line| line.split_whitespace().eq(["Version:", version])), "{spec}");
    let tool = read("tool/Cargo.toml");
    assert!(tool.contains(&format!("\nversion = \"{version}\"\n")), "{tool}");
}

#[test]
fn the_symbols_of_the_package_are_those_that_the_library_exports() {
    let symbols = read("debian/librpcrdma0.symbols");
    let own =
        symbols.lines().filter_map(|line| line.strip_prefix(' ')?.split_once(' ')).map(|(name, _)| name);
    // Version nodes are symbols too, named as `NODE@NODE`.
    let own: Vec<String> =
        own.filter(|name| name.split('@').next() != name.split('@').nth(1)).map(str::to_owned).collect();
    let wanted: Vec<String> =
        read("c-tests/exports.txt").lines().map(|line| line.replace("@@", "@")).collect();
    assert_eq!(own, wanted);
}

#[test]
fn every_name_of_the_c_api_is_in_the_changelog_and_in_a_manual_page() {
    let pages = ["clnt_rdma_create", "rpcrdma_binding_register", "rpcrdma_clnt_peer", "rpcrdma_clnt_reverse"]
        .map(|page| read(&format!("docs/{page}.3")))
        .concat()
        + &read("docs/rpcrdma.7");
    let changelog = read("CHANGELOG.md");
    let exports = read("c-tests/exports.txt");
    let own = exports.lines().filter_map(|line| line.strip_suffix("@@RPCRDMA_0"));
    let header = read("include/rpcrdma.h");
    let words = header.lines().filter_map(|line| line.strip_prefix("#define "));
    let requests: Vec<&str> =
        words.filter_map(|define| define.split_once("T_RDMA_").and(define.split(' ').next())).collect();
    assert!(requests.contains(&"CLSET_RDMA_MAXREPLY") && requests.contains(&"SVCGET_RDMA_CREDITS"));
    for name in own.chain(requests) {
        assert!(pages.contains(name), "no manual page mentions {name}");
        assert!(changelog.contains(name), "the changelog does not mention {name}");
    }
}

#[test]
fn the_readme_names_the_rust_version_that_the_manifest_asks_for() {
    let manifest = read("Cargo.toml");
    let line = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")).expect("a version");
    assert!(read("README.md").contains(&format!("Rust {} or later", line.trim_end_matches('"'))));
}

#[test]
fn what_the_pages_link_to_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = fs::read_dir(root.join("docs")).expect("docs").map(|entry| entry.expect("an entry").path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    for page in pages.chain(["README.md", "CHANGELOG.md", "fuzz/README.md"].map(|name| root.join(name))) {
        let text = fs::read_to_string(&page).expect("a page is text");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let there = link.is_empty()
                || link.contains("://")
                || page.parent().expect("a folder").join(link).exists();
            assert!(there, "{}: {link} is not there", page.display());
        }
    }
}
