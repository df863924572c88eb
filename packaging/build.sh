#!/bin/bash
# build.sh deb|rpm FOLDER: builds packages of this checkout, in a copy of it, and puts them into FOLDER.
#
# A .deb needs debhelper and what debian/control names: `sudo apt-get build-dep ./` installs that; if Rust is not Debian's,
# missing packages are only named. An RPM needs rpmbuild. Crates in vendor/ are copied too, and nothing is fetched then.
#
# Environment: SOURCE_DATE_EPOCH, the time of the files in the packages; by default that of the newest entry of debian/changelog.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=${here%/*}
usage() { echo "usage: build.sh deb|rpm FOLDER" >&2; exit 2; }
[ $# -eq 2 ] || usage
mkdir -p "$2" && out=$(cd "$2" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/Cargo.toml" | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
needs() { command -v "$1" >/dev/null || { echo "build.sh: $1 is needed: apt install $2" >&2; exit 1; }; }

mkdir "$work/rpcrdma-$version"
tar -C "$top" --exclude=./target --exclude=./build --exclude=./.git -cf - . | tar -C "$work/rpcrdma-$version" -xf -
cd "$work/rpcrdma-$version"
# debhelper gives the build a home of its own, which has neither the user's Rust nor the crates.
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
export CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}
CARGO=${CARGO:-$(bash tests/packages.sh cargo)}
export CARGO

case $1 in
deb)
    needs dpkg-buildpackage dpkg-dev
    needs dh debhelper
    dpkg-checkbuilddeps || echo "build.sh: going on without those" >&2
    dpkg-buildpackage -us -uc -b -d >&2
    cp ../*.deb ../*.buildinfo ../*.changes "$out/"
    ;;
rpm)
    needs rpmbuild rpm
    tar -C .. -czf "../rpcrdma-$version.tar.gz" "rpcrdma-$version"
    # If rpm is not the system's own package manager, it does not know what is installed.
    nodeps=; [ -e /etc/debian_version ] && nodeps=--nodeps
    rpmbuild -bb $nodeps --define "_topdir $work/rpm" --define "_sourcedir $work" packaging/rpcrdma.spec >&2
    cp "$work"/rpm/RPMS/*/*.rpm "$out/"
    ;;
*) usage ;;
esac
ls "$out"
