#!/bin/bash
# faults.sh [PATH...]: servers that end, a link that goes down or falls silent and a client that is killed, all while
# files are read and written, with the kernel's NFS/RDMA at the other end; a guest for each path (guest.sh). Run by
# `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "faults towards the kernel's NFS/RDMA" 600 "${BASH_SOURCE[0]}" "$@"

big=67108864 # bytes: long enough to be met in the middle
patience=120 # seconds: Linux waits for 5 to 30 before it connects again
random=$scratch/random
head -c $big /dev/urandom >"$random"
head -c 4194304 "$random" >"$scratch/less"
# So that the kernel's client sends data soon, and not all at once at the end.
must sysctl vm.dirty_background_bytes=1048576 vm.dirty_bytes=8388608
# Loads what `silence` needs.
must tc qdisc add dev lo root netem loss 0%
must tc qdisc del dev lo root

# The load: copies of `random` in both directions, by the kernel's client and our server (kr, kw), and by our client and
# the kernel's server (r, w). Their output goes to $scratch/NAME, their status to result[NAME].
declare -A load result
begin() {
    local name=$1; shift
    "$@" >"$scratch/$name" 2>&1 &
    load[$name]=$!; children+=($!)
}
# copy WHO...: starts the copies of the kernel, ours, or both, and returns while all of them are under way.
round=0
copy() {
    local who growing=()
    # The kernel caches data, and names that are gone: each round has names of its own.
    in=in.$((++round)) out=out.$round
    for who in "$@"; do
        case $who in kernel) cp "$random" "/served/$in" ;; ours) cp "$random" /export/in ;; esac
    done
    for who in "$@"; do
        case $who in
        kernel)
            connections=$(connected)
            begin kr dd if="/mnt/$in" of="$scratch/kr.got" bs=64k
            begin kw dd if="$random" of="/mnt/$out" bs=64k conv=fsync
            growing+=("$scratch/kr.got" "/served/$out") ;;
        ours)
            begin r "${nfs3[@]}" $address get in "$scratch/r.got"
            begin w "${nfs3[@]}" $address put "$random" out
            growing+=("$scratch/r.got" /export/out) ;;
        esac
    done
    wait_for 30 under_way "${growing[@]}" && all_run || FAIL "$what: it was not met in the middle"
}
under_way() {
    local size grown=0
    for size in $(stat -c %s "$@"); do [ "$size" -le 1048576 ] || grown=$((grown + 1)); done
    [ $grown = $# ]
}
all_run() {
    local pid
    for pid in "${load[@]}"; do kill -0 "$pid" 2>/dev/null || return; done
}
# Waits for all, for at most $patience seconds. `micros` tells how long that took.
all_end() {
    local name
    timed wait_for $patience none_runs
    for name in "${!load[@]}"; do
        result[$name]=hangs
        if ! kill -0 "${load[$name]}" 2>/dev/null; then wait "${load[$name]}"; result[$name]=$?; fi
    done
    load=()
}
none_runs() {
    local pid
    for pid in "${load[@]}"; do ! kill -0 "$pid" 2>/dev/null || return; done
}
# How often the kernel's client has connected.
connected() { grep -A40 ' /mnt ' /proc/self/mountstats | awk '/xprt:.*rdma/ { print $5; exit }'; }

# The verdicts. The kernel's client notices nothing but a delay.
the_kernel_has_copied() {
    if [ "${result[kr]}${result[kw]}" = 00 ] && cmp "$random" "$scratch/kr.got" && cmp "$random" "/served/$out"; then
        ok "$what: the kernel's client is done $(seconds) later, after $(($(connected) - connections)) more connections"
    else
        cat "$scratch/kr" "$scratch/kw" "$log" >"$scratch/out"
        FAIL "$what: the kernel's client, after $(seconds)" "$scratch/out"
    fi
    rm -f "/served/$in" "/served/$out" "$scratch/kr.got"
}
# Our client goes on; or, where it `may end`, it reports at once, or after its 25 seconds, what is wrong (a server that is
# about to end may ask it to come back later, and one that has gone refuses new connections).
said='^server: RPC: (Unable to (send|receive)|Timed out)|^nfs3: server: .*NFS3ERR_JUKEBOX|RPC: Remote system error - Connection refused; no RDMA connection'
we_have_copied() {
    local name words
    cmp -s "$random" "$scratch/r.got" || [ "${result[r]}" != 0 ] || FAIL "$what: what was read differs"
    cmp -s "$random" /export/out || [ "${result[w]}" != 0 ] || FAIL "$what: what was written differs"
    for name in r w; do
        if [ "${result[$name]}" = 0 ]; then ok "$what: our client ($name) is done $(seconds) later"
        elif [ "${1:-}" = 'may end' ] && words=$(grep -E "$said" "$scratch/$name") && [ "$micros" -lt "$(patient 40)000000" ]; then
            ok "$what: our client ($name), within $(seconds): ${words#server: }"
        else FAIL "$what: our client ($name), within $(seconds)" "$scratch/$name"; fi
    done
    rm -f /export/in /export/out "$scratch/r.got"
}
the_next_is_served() {
    if timed "${client[@]}" $address put "$scratch/less" out >"$scratch/out" 2>&1 && cmp "$scratch/less" /export/out; then
        ok "$what: the next one is served ($(seconds))"
    else
        FAIL "$what: the next one is served" "$scratch/out"
    fi
}

device_up
nfsd_up
server_up
mounted || { dmesg | tail -n 20; FAIL "$path: mount"; closing; }

what="$path: our server killed"
copy kernel
kill -9 "$server"; wait "$server" 2>/dev/null
server_up
all_end
the_kernel_has_copied

# Longer than the kernel waits before its first retry, which finds nobody.
what="$path: our server gone for 7 seconds"
copy kernel
stop "$server"
sleep 7
server_up
all_end
the_kernel_has_copied

link_down_and_up() {
    must ip link set dummy0 down
    sleep 3
    must ip link set dummy0 up
    all_end
}
# The address is the guest's own: TCP goes over lo, while rxe goes over nothing that could be silenced.
silence() { must tc qdisc add dev lo root netem loss 100%; }
silence_ends() { must tc qdisc del dev lo root; }
if [ "${path#*/}" != rxe ]; then
    what="$path: the link down for 3 seconds"
    copy ours kernel
    link_down_and_up
    the_kernel_has_copied
    we_have_copied 'may end'
    the_next_is_served

    what="$path: silence for 3 seconds"
    copy ours kernel
    silence
    sleep 3
    silence_ends
    all_end
    the_kernel_has_copied
    we_have_copied

    what="$path: silence"
    copy ours
    silence
    all_end
    silence_ends
    we_have_copied 'may end'
    the_next_is_served
fi
must umount /mnt
stop "$server"

what="$path: nfsd restarted"
copy ours
must rpc.nfsd 0
nfsd_threads
all_end
we_have_copied 'may end'
the_next_is_served

what="$path: one of our clients killed"
copy ours
kill -9 "${load[w]}"
all_end 2>/dev/null
if [ "${result[r]}" = 0 ] && cmp "$random" "$scratch/r.got"; then ok "$what: the other one is done $(seconds) later"
else FAIL "$what: the other one" "$scratch/r"; fi
the_next_is_served
rm -f "$scratch/r.got"

# A link that went down under load leaves rxe without a connection manager, for rping too: nothing can connect until the
# device is created anew. What is under way must end all the same.
if [ "${path#*/}" = rxe ]; then
    what="$path: the link down for 3 seconds"
    copy ours
    link_down_and_up
    we_have_copied 'may end'
fi
device_down
closing
