#!/bin/bash
# nfs.sh [PATH...]: the examples' NFS version 3 client and server against those of the Linux kernel, over RDMA, in a
# guest for each path (guest.sh). Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "the kernel's NFS/RDMA" 400 "${BASH_SOURCE[0]}" "$@"

sizes=(0 1 3 5 399 400 401 1023 4095 4096 4097 65535 65536 65537 262143 262144 1048575 1048576 5000001 16777216)
random=$scratch/random
head -c 16777216 /dev/urandom >"$random"
git init -q "$scratch/repository" && cp -r "$top/src" "$scratch/repository" && git -C "$scratch/repository" add -A &&
    git -C "$scratch/repository" -c user.name=n -c user.email=n@n commit -qm all

our_client() {
    local own what i
    for own in '' -P; do
        what="$path: our client, the kernel's server"
        [ -z "$own" ] || what+=", a buffer of its own"
        if timed "${client[@]}" $own $address check -L 1,2,3,255,1000 "${sizes[@]}" >"$scratch/out" 2>&1; then
            ok "$what: $(cat "$scratch/out") ($(seconds))"
        else
            FAIL "$what" "$scratch/out"
        fi
    done
    what="$path: 16 MiB lie at the kernel's server as they were"
    if timed "${client[@]}" $address put "$random" random && cmp "$random" /export/random; then
        ok "$what ($(rate 16777216))"
    else
        FAIL "$what"
    fi
    what="$path: and come back"
    if timed "${client[@]}" $address get random "$scratch/got" && cmp "$random" "$scratch/got"; then
        ok "$what ($(rate 16777216))"
    else
        FAIL "$what"
    fi
    mkdir /export/names && (cd /export/names && for i in {1..300}; do : >"name $i"; done)
    if [ "$("${client[@]}" $address ls /names | grep -c '^name ')" = 300 ]; then ok "$path: 300 names, listed"
    else FAIL "$path: 300 names, listed"; fi
    # The first message right after the startup meets a race in siw; nobody may see it.
    if timed twenty_connections; then ok "$path: 20 connections, one after the other ($(seconds))"
    else FAIL "$path: 20 connections, of which one took too long" "$scratch/out"; fi
}
twenty_connections() {
    local i
    for ((i = 0; i < 20; i++)); do timeout "$(patient 10)" "${nfs3[@]}" $address stat /random >"$scratch/out" 2>&1 || return; done
}

# kernels_client NAME [OPTION...]: tests the kernel's client with our server, which gets these options.
kernels_client() {
    local path=$1 size wrong= xprt counted
    server_up "${@:2}"
    mounted || { FAIL "$path: the kernel mounts our server" "$log"; return; }
    ok "$path: the kernel mounts our server"
    for size in "${sizes[@]}"; do head -c "$size" "$random" >/mnt/file.$size; done
    umount /mnt && mounted
    for size in "${sizes[@]}"; do
        head -c "$size" "$random" >"$scratch/part"
        cmp -s "$scratch/part" /served/file.$size && cmp -s "$scratch/part" /mnt/file.$size || wrong+=" $size"
    done
    if [ -z "$wrong" ]; then ok "$path: files of ${#sizes[@]} sizes, written and read back"; else FAIL "$path: files of$wrong bytes"; fi
    if timed two_writers && cmp -s "$random" /served/one && cmp -s "$random" /served/two; then
        ok "$path: two writers, odd blocks ($(rate 33554432))"
    else
        FAIL "$path: two writers, odd blocks"
    fi
    umount /mnt && mounted
    if timed cmp "$random" /mnt/one; then ok "$path: read again ($(rate 16777216))"; else FAIL "$path: read again"; fi
    if timed git clone -q "$scratch/repository" /mnt/clone && git -C /mnt/clone fsck >"$scratch/out" 2>&1 &&
        diff -r "$top/src" /served/clone/src >"$scratch/out"; then ok "$path: git clone, fsck ($(seconds) the clone)"
    else FAIL "$path: git clone, fsck" "$scratch/out"; fi
    # Read, Write and Reply chunks, and the bytes of Calls and Replies that travelled in them.
    read -r -a xprt <<<"$(grep -A40 ' /mnt ' /proc/self/mountstats | grep -m 1 'xprt:.*rdma')"
    counted="${xprt[12]} Read, ${xprt[13]} Write, ${xprt[14]} Reply chunks; ${xprt[15]} bytes there, ${xprt[16]} back"
    if [ "${xprt[15]}" -gt 16777216 ] && [ "${xprt[16]}" -gt 16777216 ]; then ok "$path: mountstats: $counted"
    else FAIL "$path: mountstats: $counted"; fi
    if umount /mnt; then ok "$path: umount"; else FAIL "$path: umount"; fi
    stop "$server"
    rm -rf /served/*
}
two_writers() {
    dd if="$random" of=/mnt/one bs=4097 status=none &
    dd if="$random" of=/mnt/two bs=65537 status=none && wait $!
}

device_up
nfsd_up
our_client
kernels_client "$path"
kernels_client "$path, four threads of our server" -t 4
device_down
closing
