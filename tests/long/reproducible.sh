#!/bin/bash
# reproducible.sh: two builds of this checkout, in different folders, with different homes of cargo, at different times and with
# different umasks, give the same bytes: the library, rpcrdma, rpcrdma-run, generated files. Each of the builds takes minutes.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
unset MAKEFLAGS MAKELEVEL MFLAGS CARGO_TARGET_DIR RUSTFLAGS
mine=${CARGO_HOME:-$HOME/.cargo}
cargo=$(cd "$top" && bash tests/packages.sh cargo) || { FAIL "a cargo"; closing; }

# build NAME FOLDER: puts the results into $scratch/NAME. Uses copies of the crates that were already fetched.
build() {
    local folder=$scratch/$2 home=$scratch/$2-home
    mkdir -p "$folder" "$home/registry"
    # -m: gives the sources the time of the build.
    tar -C "$top" --exclude=./target --exclude=./build --exclude=./.git -cf - . | tar -C "$folder" -m -xf -
    cp "$mine"/config.toml "$mine"/credentials.toml "$home/" 2>/dev/null
    cp -a "$mine"/registry/{cache,index} "$home/registry/" 2>/dev/null
    if CARGO_HOME=$home CARGO=$cargo make -C "$folder" >"$scratch/log" 2>&1; then
        ok "the $1 build"
    else
        FAIL "the $1 build" "$scratch/log"; closing
    fi
    cp -a "$folder/build" "$scratch/$1"
    # So that the next build does not see what this one has left.
    rm -rf "$folder" "$home"
}
build first one
umask 027
TZ=Asia/Tokyo build second another-place/deeper/than/the-first

# The archive is not installed; flags names the folders.
for file in $(cd "$scratch/first" && find . -type f ! -name flags ! -name '*.a' -printf '%P\n' | sort); do
    if cmp "$scratch/first/$file" "$scratch/second/$file" >"$scratch/log" 2>&1; then ok "$file"; else FAIL "$file" "$scratch/log"; fi
    # In an ELF file grep finds what strings(1) would.
    if grep -aFq -e "$scratch" -e "$HOME/" "$scratch/first/$file"; then
        FAIL "$file names no folder of this machine"
    else
        ok "$file names no folder of this machine"
    fi
done
closing
