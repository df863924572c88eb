//! The part of the library in this program calls libtirpc, whose functions it also replaces.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--no-as-needed");
    println!("cargo::rustc-link-lib=tirpc");
}
