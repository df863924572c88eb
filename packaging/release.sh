#!/bin/bash
# release.sh FOLDER: makes a release of the tag that is checked out: the sources, their crates, packages and SHA256SUMS.
#
#   rpcrdma-VERSION.tar.gz           the sources
#   rpcrdma-VERSION-vendor.tar.gz    vendor/, to be unpacked in the sources to build without a network. In Debian's terms
#                                    rpcrdma_VERSION.orig.tar.gz and its component vendor.
#   *.deb, *.rpm                     each if its tools are installed; otherwise a line says that they are not
#
# It refuses a tree with changes, and a tag other than v and Cargo.toml's version.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "release.sh: $*" >&2; exit 1; }
[ $# -eq 1 ] || { echo "usage: release.sh FOLDER" >&2; exit 2; }
[ -z "$(git status --porcelain)" ] || die "the tree has changes: commit them first (git status)"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
tag=$(git describe --exact-match --tags --match 'v*' HEAD 2>/dev/null) || die "no tag stands here: git tag v$version"
[ "$tag" = "v$version" ] || die "the tag is $tag, and Cargo.toml says $version"
! sed -n '/^## \[/{p;q}' CHANGELOG.md | grep -q unreleased || die "CHANGELOG.md calls this version unreleased"
[ ! -e "$1" ] || [ -z "$(ls -A "$1")" ] || die "$1 is not empty"
mkdir -p "$1" && out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

name=rpcrdma-$version
git archive --prefix="$name/" HEAD | gzip -9n >"$out/$name.tar.gz"
tar -C "$work" -xf "$out/$name.tar.gz"
cd "$work/$name"
cargo=$(bash tests/packages.sh cargo) || die "$cargo is too old or does not work"
$cargo vendor --locked --versioned-dirs vendor >/dev/null 2>"$work/log" || { cat "$work/log" >&2; die "cargo vendor fails"; }
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -cf - vendor | gzip -9n >"$out/$name-vendor.tar.gz"
for kind in deb:dh rpm:rpmbuild; do
    if command -v "${kind#*:}" >/dev/null; then
        bash packaging/build.sh "${kind%:*}" "$out" >/dev/null || die "the ${kind%:*} packages cannot be built"
    else
        echo "release.sh: no ${kind%:*} packages, for want of ${kind#*:}"
    fi
done
cd "$out"
sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .
cat SHA256SUMS
