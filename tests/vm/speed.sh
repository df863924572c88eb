#!/bin/bash
# speed.sh [PATH...]: how fast the examples' NFS version 3 client is compared with the kernel's own, in one guest, with the
# kernel's server, over the same device: READs and WRITEs of 4 KiB and 1 MiB, one after the other, without a cache
# (O_DIRECT for the kernel's). Then our client with our server, in Version Two, 16 KiB a call: with Receives of 4 KiB and of
# 64 KiB at both ends, and without remote invalidation. Then a program without bindings, with room for replies of several
# lengths, which must cost no registration per call. Nothing here can fail for being slow. A guest for each path (guest.sh).
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "speed beside the kernel's client" 300 "${BASH_SOURCE[0]}" "$@"

cases=('write 4096 500' 'read 4096 500' 'write 1048576 24' 'read 1048576 24')
runs=5

# Both append microseconds per call to a file for the case. `read` reads what the preceding `write` has written.
kernels() {
    local file=/mnt/kernels.$2 seconds
    local -A how=([write]="if=/dev/zero of=$file oflag=direct" [read]="if=$file of=/dev/null iflag=direct")
    # shellcheck disable=SC2086
    seconds=$(dd ${how[$1]} bs="$2" count="$3" 2>&1 | awk -F', ' 'END { print $(NF - 1) + 0 }')
    awk -v s="$seconds" -v n="$3" 'BEGIN { print s / n * 1e6 }' >>"$scratch/theirs.$1.$2"
}
ours() {
    "${client[@]}" -P $address bench "$1" "$2" "$3" "ours.$2" >"$scratch/bench" 2>&1 ||
        { FAIL "bench $*" "$scratch/bench"; closing; }
    sed 's/.*; per call //' "$scratch/bench" >"$scratch/counters.$1.$2"
    awk '{ print $3 }' "$scratch/bench" >>"$scratch/ours.$1.$2"
}
median() { sort -n "$1" | awk '{ v[NR] = $1 } END { print v[(NR + 1) / 2] }'; }

compare() {
    local case i theirs our what size counted
    must mkdir -p /mnt
    local options=rdma,port=20049,vers=3,nolock,mountproto=tcp,mountport=20048
    must timeout "$(patient 60)" mount -t nfs -o $options $address:/export /mnt
    for ((i = 0; i < runs; i++)); do
        for case in "${cases[@]}"; do
            # shellcheck disable=SC2086
            { kernels $case; ours $case; }
        done
    done
    # There must be one RPC for each of dd's blocks, as with ours, or nothing is compared.
    counted=$(sed '1,\, /mnt ,d' /proc/self/mountstats |
        awk '$1 ~ /^(READ|WRITE|COMMIT):/ { printf " %s %d", $1, $2 }')
    must umount /mnt
    echo "medians of $runs runs, the kernel's client and ours in turn; ratio: how many times as fast ours is"
    printf '%-10s %-14s %12s %9s %12s %9s %7s\n' "$path" '' "kernel's us" MB/s 'ours us' MB/s ratio
    for case in "${cases[@]}"; do
        read -r what size _ <<<"$case"
        theirs=$(median "$scratch/theirs.$what.$size") our=$(median "$scratch/ours.$what.$size")
        awk -v c="$what $size" -v s="$size" -v t="$theirs" -v o="$our" 'BEGIN {
            printf "%-10s %-14s %12.1f %9.2f %12.1f %9.2f %7.2f\n", "", c, t, s / t, o, s / o, t / o }'
    done
    echo "  calls of the kernel's client:$counted"
    for case in "${cases[@]}"; do
        read -r what size _ <<<"$case"
        echo "  $what $size, per call: $(cat "$scratch/counters.$what.$size")"
    done
}

version_two() {
    local how what i log=$scratch/servers.log
    local -A port_of settings
    mkdir -p /served
    must mount -t tmpfs served /served
    for how in 4K 64K 4K-local; do
        settings[$how]="RPCRDMA_VERSION=2 RPCRDMA_INLINE=${how%-local}"
        [ "$how" = "${how%-local}" ] || settings[$how]+=" RPCRDMA_REMOTE_INVALIDATION=no"
        port_of[$how]=$((20060 + 2 * ${#settings[@]}))
        # shellcheck disable=SC2086
        start_ready env ${settings[$how]} "${preloaded[@]}" "$programs/nfs3d" -n rdma -d /served -a 0.0.0.0 \
            -p "${port_of[$how]}" -m $((port_of[$how] + 1)) || { FAIL "our server in version 2, $how" "$log"; closing; }
    done
    for ((i = 0; i < runs; i++)); do
        for how in "${!settings[@]}"; do
            for what in write read; do
                # shellcheck disable=SC2086
                timeout "$(patient 60)" env ${settings[$how]} "${preloaded[@]}" "$programs/nfs3" -n rdma -p "${port_of[$how]}" \
                    -m $((port_of[$how] + 1)) -e / -P $address bench $what 16384 200 two >"$scratch/bench" 2>&1 ||
                    { FAIL "bench $what in version 2, $how" "$scratch/bench"; closing; }
                awk '{ print $3 }' "$scratch/bench" >>"$scratch/two.$what.$how"
                sed 's/.*; per call //' "$scratch/bench" >"$scratch/two.counters.$what.$how"
            done
        done
    done
    echo "our client at our server in version 2, 16 KiB a call, medians of $runs runs in turn; Receives of so many bytes at"
    echo "both ends, local: no remote invalidation"
    for what in write read; do
        for how in 4K 64K 4K-local; do
            echo "  $what $how: $(median "$scratch/two.$what.$how") us, per call: $(cat "$scratch/two.counters.$what.$how")"
        done
    done
    for i in "${children[@]}"; do stop "$i"; done
}

without_bindings() {
    local most what i name count=100 log=$scratch/server.log
    must gcc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread $(pkg-config --cflags libtirpc) \
        -o "$scratch/bench" "$here/../../bench/bench.c" $(pkg-config --libs libtirpc)
    export ADDRESS=$address
    start_ready "${preloaded[@]}" "$scratch/bench" server rdma || { FAIL 'the server of the benchmark' "$log"; closing; }
    client() { timeout "$(patient 60)" env RPCRDMA_MAX_REPLY=$most "${preloaded[@]}" "$scratch/bench" "$@"; }
    for ((i = 0; i < runs; i++)); do
        for what in 'null 0' 'write 65536'; do
            for most in 256K 4M auto; do
                # shellcheck disable=SC2086
                client client rdma "$port" $what 1 own 0.5 >"$scratch/out" 2>&1 ||
                    { FAIL "bench $what, room for $most" "$scratch/out"; closing; }
                awk '{ print $2 }' "$scratch/out" >>"$scratch/unbound.${what% *}.$most"
            done
        done
    done
    echo "a program without bindings, at our server, medians of $runs runs in turn; and what a call of the client costs"
    for what in 'null 0' 'write 65536'; do
        for most in 256K 4M auto; do
            # shellcheck disable=SC2086
            client counters rdma "$port" $what $count >"$scratch/out" 2>&1 || { FAIL "counters, $what" "$scratch/out"; closing; }
            awk -v c="${what% *}, RPCRDMA_MAX_REPLY=$most" -v t="$(median "$scratch/unbound.${what% *}.$most")" \
                '{ printf "  %s: %.0f us, %s registrations, %s Sends, %s system calls\n", c, t, $5, $7, $9 }' "$scratch/out"
            [ "$what" = 'null 0' ] && [ "$path" != iwarp ] || continue
            name="a null call registers nothing, with RPCRDMA_MAX_REPLY=$most"
            if awk '{ exit $5 != 0 }' "$scratch/out"; then ok "$name"; else FAIL "$name" "$scratch/out"; fi
        done
    done
    stop "$server"
}

# Receives of 64 KiB for all credits are more than the usual limit of 8 MiB.
ulimit -l unlimited
device_up
nfsd_up
compare
version_two
without_bindings
device_down
closing
