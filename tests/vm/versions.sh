#!/bin/bash
# versions.sh [PATH...]: Version Two offered to the Linux kernel, whose NFS/RDMA speaks only Version One; and spoken between
# our own client and server over the same device. In a guest for each path (guest.sh). Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "two versions and the kernel's NFS/RDMA" 300 "${BASH_SOURCE[0]}" "$@"

sizes=(0 399 4000 4096 16000 65537 1048577)
out=$scratch/out log=$scratch/log
# agreed VERSION: the log shows that version, on one connection.
agreed() {
    [ "$(grep -c "$rdma_line" "$log")" -eq 1 ] && [ "$(grep -c "RPC-over-RDMA version [12], inline" "$log")" -ge 1 ] &&
        ! grep "RPC-over-RDMA version [12], inline" "$log" | grep -qv "version $1," && ! grep -q 'connecting anew' "$log"
}
offered() { sed -n 's/.*\(RPC-over-RDMA version [12], inline .*\)/\1/p' "$log" | tail -n 1; }

our_client() {
    what="$path: our client with both versions, the kernel's server"
    if timed env RPCRDMA_VERSION=auto RPCRDMA_LOG=info RPCRDMA_LOG_FILE="$log" "${client[@]}" $address \
        check -N 0 -L 1 "${sizes[@]}" >"$out" 2>&1 && agreed 1; then ok "$what: $(cat "$out") ($(seconds)), $(offered)"
    else cat "$log" >>"$out"; FAIL "$what" "$out"; fi
    what="$path: our client with version 2 only, the kernel's server"
    if timed env RPCRDMA_VERSION=2 "${client[@]}" $address stat / >"$out" 2>&1; then FAIL "$what" "$out"
    elif grep -q 'speaks RPC-over-RDMA versions 1 to 1, not 2' "$out" && [ $micros -lt "$(patient 5)000000" ]; then ok "$what: refused at once"
    else FAIL "$what: refused at once ($(seconds))" "$out"; fi
}

kernels_client() {
    local size wrong=
    what="$path: the kernel's client, our server with both versions"
    server_up
    if mounted; then ok "$what: mount"; else FAIL "$what: mount" "$log"; return; fi
    for size in "${sizes[@]}"; do head -c "$size" /dev/urandom | tee "$scratch/file.$size" >/mnt/file.$size; done
    umount /mnt && mounted
    for size in "${sizes[@]}"; do cmp -s "$scratch/file.$size" /mnt/file.$size || wrong+=" $size"; done
    if [ -z "$wrong" ] && grep -q 'RPC-over-RDMA version 1, inline' "$log" && ! grep -q 'version 2, inline' "$log"; then
        ok "$what: files of ${#sizes[@]} sizes, in version 1"
    else
        FAIL "$what: files of$wrong bytes" "$log"
    fi
    umount /mnt || FAIL "$what: umount"
}

ours() {
    local has
    for has in auto 2; do
        what="$path: our client with version $has, our server with both"
        log=$scratch/log.$has
        if timed env RPCRDMA_VERSION=$has RPCRDMA_LOG=info RPCRDMA_LOG_FILE="$log" timeout "$(patient 120)" "${preloaded[@]}" \
            "$programs/nfs3" -n rdma -p 20050 -m 20051 -e / $address check -N 0 -L 1 "${sizes[@]}" >"$out" 2>&1 &&
            agreed 2; then ok "$what: $(cat "$out") ($(seconds)), $(offered)"
        else cat "$log" >>"$out"; FAIL "$what" "$out"; fi
    done
}

device_up
nfsd_up
our_client
export RPCRDMA_VERSION=auto
kernels_client
ours
stop "$server"
device_down
closing
