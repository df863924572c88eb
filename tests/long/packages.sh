#!/bin/bash
# packages.sh [FOLDER]: Debian packages of this checkout on a minimal Debian 12, as the README says: they are installed by apt,
# debian/tests is run, and they are purged. After that the system has the files that it had before, and no others.
#
# FOLDER has packages that were built before (make deb); otherwise they are built here. Needs root and a network, or skips.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
. "$here/minimal.sh"

packages=${1:-$scratch/packages}
if [ $# -eq 0 ]; then
    command -v dh >/dev/null || apt-get -qq -y install --no-install-recommends debhelper fakeroot >"$scratch/log" 2>&1 ||
        { skip "packages" "debhelper cannot be installed"; closing; }
    if bash "$top/packaging/build.sh" deb "$packages" >"$scratch/build.log" 2>&1; then
        ok "the packages are built"
    else
        FAIL "the packages are built" "$scratch/build.log"; closing
    fi
fi
if ! command -v lintian >/dev/null; then
    skip "lintian" "not installed"
elif lintian --fail-on error,warning "$packages"/*.changes >"$scratch/lintian.log" 2>&1; then
    ok "lintian"
else
    FAIL "lintian" "$scratch/lintian.log"
fi

root=$scratch/root
cp -a "$base" "$root"
mkdir "$root/packages" && cp "$packages"/*.deb "$root/packages/"
mkdir "$root/test" && cp "$top/debian/tests/stock-pairs" "$top/tests/ns.sh" "$root/test/"

# inside COMMAND: runs it as root in $root, with the mounts of a running system, which are gone before anything is deleted.
inside() {
    root=$root debs=$cache/debs unshare --mount --pid --fork --kill-child bash -c '
        # Private networks ask for a root that is a mount point.
        mount --bind "$root" "$root" && cd "$root" &&
        mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" || exit 125
        mount -t tmpfs -o mode=1777 shm "$root/dev/shm" && mount -t tmpfs tmpfs "$root/run"
        mount --bind "$debs" "$root/var/cache/apt/archives"
        "$@"' bash chroot "$root" env -i PATH="$path" HOME=/root TERM=dumb LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        bash -c "$1" </dev/null &
    children=($!)
    wait $!
}
# unshare itself heeds no other signal while its child is there.
trap 'kill -KILL "${children[@]}" 2>/dev/null; exit 130' INT TERM

# files: all files with their contents, except the records of dpkg and apt, caches and logs, and rpc.statd's own state.
files() {
    (
        cd "$root" || exit
        apart=(-path ./tmp)
        for folder in proc sys dev run packages test var/cache var/log var/lib/{dpkg,apt,nfs}; do apart+=(-o -path "./$folder"); done
        find . \( "${apart[@]}" \) -prune -o -type f -print0 | sort -z | xargs -0 sha256sum
        find . \( "${apart[@]}" \) -prune -o ! -type f -printf '%y %p %l\n' | sort
    )
}
step() { # NAME COMMAND
    if inside "$2" >"$scratch/log" 2>&1; then ok "$1"; else FAIL "$1" "$scratch/log"; fi
}

# Packages that are not ours, among them those that debian/tests depends on.
depends=$(sed -n '/^Depends:/,/^Restrictions:/{s/^ \([a-z0-9.+-]*\).*,$/\1/p}' "$top/debian/tests/control" | grep -v rpcrdma)
step "what the test needs is installed" \
    "apt-get -qq -y install --no-install-recommends iproute2 netbase $(tr '\n' ' ' <<<"$depends")"
files >"$scratch/before"
step "apt installs the packages" "apt-get -qq -y install --no-install-recommends /packages/librpcrdma0_*.deb /packages/rpcrdma-tools_*.deb /packages/librpcrdma-dev_*.deb"
inside "dpkg -l 'librpcrdma*' rpcrdma-tools" >"$scratch/log" 2>&1
if [ "$(grep -c '^ii' "$scratch/log")" -eq 3 ]; then ok "all three are there"; else FAIL "all three are there" "$scratch/log"; fi
if inside "bash /test/ns.sh bash /test/stock-pairs" >"$scratch/log" 2>&1; then
    ok "the stock pairs ($(grep -c '^ok' "$scratch/log") checks)"
else
    FAIL "the stock pairs" "$scratch/log"
fi
sed 's/^/      /' "$scratch/log"
# Finds links of pages that lead nowhere.
step "each link of the installed pages leads somewhere" "cd /usr/share/doc/rpcrdma-tools && [ -e README.md ] &&
    ! find . -name '*.md' | while read -r page; do
        grep -oE '\\]\\([^)#]+' \"\$page\" | sed 's/^](//' | grep -v '^[a-z]*:' | while read -r link; do
            [ -e \"\${page%/*}/\$link\" ] || echo \"\$page: \$link\"
        done
    done | grep ."
step "apt purges them" "apt-get -qq -y purge librpcrdma0 librpcrdma-dev rpcrdma-tools"
files >"$scratch/after"
if diff "$scratch/before" "$scratch/after" >"$scratch/log"; then ok "nothing is left"; else FAIL "nothing is left" "$scratch/log"; fi
closing
