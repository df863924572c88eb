//! The library's part in this program asks libtirpc, whose functions it also stands in for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--no-as-needed");
    println!("cargo::rustc-link-lib=tirpc");
}
