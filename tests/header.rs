//! The committed header is what cbindgen generates from the C API, and the version script exports what the header declares.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/capi.rs"))
        .generate()
        .expect("src/capi.rs");
    let mut header = Vec::new();
    bindings.write(&mut header);
    for_c(&String::from_utf8(header).expect("a header is text"))
}

/// What cbindgen has no setting for: writes the numbers of requests as they are in the source, and leaves out rustdoc's
/// headings.
fn for_c(header: &str) -> String {
    let mut mended = String::with_capacity(header.len());
    for line in header.lines().filter(|line| !line.trim_start().starts_with("// # ")) {
        let number = line.strip_prefix("#define ").and_then(|define| define.split_once(' '));
        match number
            .and_then(|(name, value)| Some((name, value.parse::<u32>().ok().filter(|n| *n > 0xffff)?)))
        {
            Some((name, number)) => mended.push_str(&format!("#define {name} {number:#x}")),
            None => mended.push_str(line),
        }
        mended.push('\n');
    }
    mended
}

#[test]
fn the_committed_header_is_what_cbindgen_makes_of_the_c_api() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/rpcrdma.h");
    let generated = generated();
    if std::env::var_os("RPCRDMA_BLESS").is_some_and(|value| value == "1") {
        fs::write(&path, &generated).expect("include/rpcrdma.h is writable");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/rpcrdma.h is stale; RPCRDMA_BLESS=1 cargo test --test header writes it:\n{generated}"
    );
}

#[test]
fn every_function_of_the_header_is_an_export_and_every_own_export_is_declared() {
    let header = generated();
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|line| !line.starts_with(['/', '*', ' ', '#']))
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.contains("rdma"))
        .collect();
    let exports = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("c-tests/exports.txt"))
        .expect("c-tests/exports.txt");
    let exported: BTreeSet<&str> =
        exports.lines().filter_map(|line| line.strip_suffix("@@RPCRDMA_0")).collect();
    assert!(!declared.is_empty());
    assert_eq!(declared, exported);
}
