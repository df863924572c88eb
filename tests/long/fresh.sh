#!/bin/bash
# fresh.sh [WAY:COMMAND...]: the README's two commands on a minimal Debian 12 that has nothing but git, each on a system
# of its own, and what they ask the user to do.
#
#   rustup    root, with the Rust of this machine's rustup
#   debian    root, with nothing: Debian's Rust is installed
#   old       root, with Debian's first Rust, 1.63, which is too old
#   bare      root, in a chroot that cannot have private networks, where libclang cannot be installed: no adapters
#   user      an ordinary user without sudo, with Debian's first Rust; root runs the line that the command names
#
# Without arguments: demo and check in each way, except for old, where demo alone shows the difference. Needs root and a
# network, or skips. debootstrap's system and Debian's packages are kept in $RPCRDMA_FRESH (~/.cache/rpcrdma-fresh).
# apt and cargo use the same sources as on this machine.
#
# Environment: FRESH_LOGS, a folder that keeps what was printed.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
logs=${FRESH_LOGS:-$scratch}
[ $# -gt 0 ] || set -- {rustup,debian,bare,user}:{demo,check} old:demo
. "$here/minimal.sh"
mkdir -p "$logs"

# A clone of this checkout as it is.
git -C "$top" ls-files -z --cached --others --exclude-standard >"$scratch/files" 2>/dev/null ||
    { skip "a fresh machine" "this is no clone"; closing; }
(cd "$top" && xargs -0 -a "$scratch/files" ls -d 2>/dev/null) >"$scratch/there"
tar -C "$top" -cf "$scratch/clone.tar" -T "$scratch/there"

# This machine's settings of cargo: where its crates come from.
mine=${CARGO_HOME:-$HOME/.cargo}
settings=(PATH=$path TERM=dumb LANG=C.UTF-8)
while read -r setting; do settings+=("$setting"); done < <(env | grep -i -E '^(https?|all|no)_proxy=|^CARGO_(HTTP|NET|REGISTR|SOURCE)[A-Z_]*=')

# system WAY: creates $root, with what this way has before the user begins.
system() {
    local home=/root tool
    rm -rf --one-file-system "$root"
    cp -a "$base" "$root"
    if [ "$1" = user ]; then
        inside as_root "useradd -m person"
        home=/home/person
    fi
    mkdir -p "$root$home/.cargo" "$root$home/rpcrdma"
    cp "$mine"/config{,.toml} "$mine"/credentials.toml "$root$home/.cargo/" 2>/dev/null
    # Crates that this machine has already need not be fetched.
    [ ! -d "$mine/registry" ] || (cd "$mine" && tar -cf - registry/cache registry/index) | tar -C "$root$home/.cargo" -xf -
    tar -C "$root$home/rpcrdma" -xf "$scratch/clone.tar"
    [ "$1" != user ] || chroot "$root" chown -R person:person /home/person
    case $1 in
    old | user) inside as_root "apt-get -qq -y install --no-install-recommends cargo rustc >/dev/null" ;;
    rustup)
        mkdir -p "$root/root/.cargo/bin" "$root/root/.rustup"
        cp -a "$mine/bin/rustup" "$root/root/.cargo/bin/"
        for tool in cargo rustc rustdoc rustfmt cargo-fmt cargo-clippy clippy-driver; do
            ln -sf rustup "$root/root/.cargo/bin/$tool"
        done
        ;;
    bare) printf 'Package: libclang*\nPin: release *\nPin-Priority: -1\n' >"$root/etc/apt/preferences.d/no-libclang" ;;
    esac
    rm -f "$root/ready"
}

# inside WHO COMMAND: runs a shell command in $root as root or as person, with the mounts of a running system. The mounts are
# in a namespace of their own, and are gone before anything is deleted.
inside() {
    local enter=(chroot "$root" env -i "${settings[@]}" HOME=/root)
    [ "$1" = as_root ] || enter=(chroot "$root" setpriv --reuid person --regid person --init-groups env -i "${settings[@]}" HOME=/home/person)
    root=$root debs=$cache/debs way=$way rustup=${RUSTUP_HOME:-$HOME/.rustup} unshare --mount --pid --fork --kill-child bash -c '
        # Private networks ask for a root that is a mount point.
        [ "$way" = bare ] || { mount --bind "$root" "$root" && cd "$root"; }
        mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" || exit 125
        mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
        mount --bind "$debs" "$root/var/cache/apt/archives"
        [ "$way" != rustup ] || { mount --bind "$rustup" "$root/root/.rustup" && mount -o remount,bind,ro "$root/root/.rustup"; }
        "$@"' bash "${enter[@]}" bash -c "cd ~/rpcrdma 2>/dev/null; $2" </dev/null &
    children=($!)
    wait $!
}
# unshare itself heeds no other signal while its child is there.
trap 'kill -KILL "${children[@]}" 2>/dev/null; exit 130' INT TERM

# asks LINE: records something that the user has to do.
asks() { asked+=("$1"); }

# try WAY COMMAND
try() {
    local who=as_root command=$2 begin=$SECONDS log line status
    way=$1 name="make $2, $1" asked=() root=$cache/root.$1
    log=$logs/$1-$2.log
    if [ "$way" = rustup ] && ! { [ -x "$mine/bin/rustup" ] && [ -d "${RUSTUP_HOME:-$HOME/.rustup}/toolchains" ]; }; then
        skip "$name" "this machine's Rust is not from rustup"; return
    fi
    system "$way"
    [ "$way" != user ] || who=as_person
    # The README's first line, where make is missing.
    asks "apt install make"
    inside as_root "apt-get -qq -y install make" >"$log" 2>&1

    inside $who "make $command" >>"$log" 2>&1
    status=$?
    if [ "$way" = user ]; then
        if [ $status -eq 0 ]; then FAIL "$name: asks for what is missing" "$log"; return; fi
        line=$(sed -n 's/^ *\(apt install .*\)/\1/p; s/^ *\(apt update && apt install .*\)/\1/p' "$log")
        if [ "$(grep -c . <<<"$line")" -eq 1 ]; then ok "$name: names one line"; else FAIL "$name: names one line" "$log"; fi
        if grep -q 'Rust 1\.88 or later is needed, and .*cargo is 1\.65' "$log" && grep -q 'rustup\.rs' "$log"; then
            ok "$name: says which Rust it needs, and where that comes from"
        else
            FAIL "$name: says which Rust it needs, and where that comes from" "$log"
        fi
        if [ -e "$root/home/person/rpcrdma/target" ]; then FAIL "$name: nothing is compiled before"; fi
        asks "$line"
        inside as_root "$line" >>"$log" 2>&1 || FAIL "$name: the line does what it says" "$log"
        inside as_person "make $command" >>"$log" 2>&1
        status=$?
    fi
    if [ $status -eq 0 ]; then ok "$name ($((SECONDS - begin)) s)"; else FAIL "$name (status $status)" "$log"; fi
    printf '      asked of the person: %s\n' "${asked[@]}"
    case $way in
    bare)
        # The linker must agree: the crate for adapters is there or not.
        if grep -q 'building without adapters, for want of libclang-dev$' "$log"; then
            ok "$name: one line says that there are no adapters"
        else
            FAIL "$name: one line says that there are no adapters" "$log"
        fi
        ;;
    *) if grep -q 'without adapters' "$log"; then FAIL "$name: with adapters" "$log"; fi ;;
    esac
    [ "$command" = demo ] || grep -E '^ *skip' "$log" | sed 's/^ */      /'
    rm -rf --one-file-system "$root"
}

for pair in "$@"; do try "${pair%:*}" "${pair#*:}"; done
closing
