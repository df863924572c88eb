#!/bin/bash
# reproducible.sh: two builds of this checkout, in different folders, with different homes of cargo, at different times and under
# another umask, give the same bytes: the library, rpcrdma, rpcrdma-run, what is generated. A build takes minutes, and there are two.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
unset MAKEFLAGS MAKELEVEL MFLAGS CARGO_TARGET_DIR RUSTFLAGS
mine=${CARGO_HOME:-$HOME/.cargo}
cargo=$(cd "$top" && bash tests/packages.sh cargo) || { FAIL "a cargo"; closing; }

# build NAME FOLDER: what was built is then in $scratch/NAME. The fetched crates are borrowed.
build() {
    local folder=$scratch/$2 home=$scratch/$2-home
    mkdir -p "$folder" "$home/registry"
    # -m: the sources are as new as the build.
    tar -C "$top" --exclude=./target --exclude=./build --exclude=./.git -cf - . | tar -C "$folder" -m -xf -
    cp "$mine"/config.toml "$mine"/credentials.toml "$home/" 2>/dev/null
    cp -a "$mine"/registry/{cache,index} "$home/registry/" 2>/dev/null
    if CARGO_HOME=$home CARGO=$cargo make -C "$folder" >"$scratch/log" 2>&1; then
        ok "the $1 build"
    else
        FAIL "the $1 build" "$scratch/log"; closing
    fi
    cp -a "$folder/build" "$scratch/$1"
    # A build does not see what another one has left.
    rm -rf "$folder" "$home"
}
build first one
umask 027
TZ=Asia/Tokyo build second another-place/deeper/than/the-first

# The archive is not installed; flags names the folders.
for file in $(cd "$scratch/first" && find . -type f ! -name flags ! -name '*.a' -printf '%P\n' | sort); do
    if cmp "$scratch/first/$file" "$scratch/second/$file" >"$scratch/log" 2>&1; then ok "$file"; else FAIL "$file" "$scratch/log"; fi
    # grep of an ELF file finds what strings would.
    if grep -aFq -e "$scratch" -e "$HOME/" "$scratch/first/$file"; then
        FAIL "$file names no folder of this machine"
    else
        ok "$file names no folder of this machine"
    fi
done
closing
