#!/bin/bash
# bench.sh [FILE]: tcp (stock libtirpc, nothing preloaded) against rdma (the library preloaded), in one run.
#
# Every case is measured several times; tcp and rdma take turns, so that whatever else the machine does hits both;
# the table shows medians. Then: system calls per call (if strace is there), and the processor time of an idle server.
# With FILE the table is written there too. QUICK=1 takes a few seconds and shows only that everything runs.
# RPCRDMA_* set by the caller (RPCRDMA_POLL=0 ...) reach the rdma side.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../tests/lib.sh"
report=${1:+$(realpath -m "$1")}
[ -r "$LIBRPCRDMA" ] || { echo "bench: $LIBRPCRDMA is missing: run make first" >&2; exit 1; }

if [ -n "${QUICK:-}" ]; then repeats=1 seconds=0.05 some=100; else repeats=5 seconds=0.25 some=1000; fi
cc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread $(pkg-config --cflags libtirpc) -o "$scratch/bench" \
    "$here/bench.c" $(pkg-config --libs libtirpc) || exit 1

declare -A with=([tcp]=env [rdma]="${preloaded[*]}") port_of server_of
for netid in tcp rdma; do
    start_ready ${with[$netid]} "$scratch/bench" server $netid || { echo "bench: no server on $netid" >&2; exit 1; }
    port_of[$netid]=$port server_of[$netid]=$server
done

cases=()
for what in 'null 0' 'write 4096' 'read 4096' 'write 65536' 'read 65536' 'write 1048576' 'read 1048576'; do
    for how in '1 own' '4 own' '4 shared'; do cases+=("$what $how"); done
done
for ((repeat = 0; repeat < repeats; repeat++)); do
    for i in "${!cases[@]}"; do
        for netid in tcp rdma; do
            # shellcheck disable=SC2086
            line=$(${with[$netid]} "$scratch/bench" client $netid "${port_of[$netid]}" ${cases[$i]} $seconds) ||
                { echo "bench: $netid ${cases[$i]} failed" >&2; exit 1; }
            echo "$i $netid $line" >>"$scratch/results"
        done
    done
done
median() { # CASE NETID COLUMN
    awk -v c="$1" -v n="$2" -v k="$3" '$1 == c && $2 == n { print $k }' "$scratch/results" | sort -n |
        awk '{ v[NR] = $1 } END { print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}
# Clock ticks that a process has used, user and system.
ticks() { awk '{ sub(/.*\) /, ""); print $12, $13 }' "/proc/$1/stat"; }

table() {
    echo "$(date -u +%Y-%m-%d), $(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r), loopback"
    echo "medians of $repeats runs of $seconds s each, tcp and rdma in turn$(env | sed -n 's/^LIBRPCRDMA=.*//; s/^\(RPCRDMA_[A-Z_]*=.*\)/, \1/p' | tr -d '\n')"
    echo
    printf '%-6s %8s %7s %-7s %12s %12s %10s %10s %7s\n' call bytes threads CLIENT 'tcp calls/s' 'rdma calls/s' 'tcp us' 'rdma us' ratio
    for i in "${!cases[@]}"; do
        # shellcheck disable=SC2086
        set -- ${cases[$i]} "$(median "$i" tcp 3)" "$(median "$i" rdma 3)" "$(median "$i" tcp 4)" "$(median "$i" rdma 4)"
        printf '%-6s %8s %7s %-7s %12s %12s %10s %10s %7s\n' "$@" "$(awk -v t="$5" -v r="$6" 'BEGIN { printf "%.2f", t ? r / t : 0 }')"
    done
    echo "ratio: rdma calls per second / tcp calls per second"
    echo
    if command -v strace >/dev/null; then
        printf '%-24s %12s %12s\n' 'system calls per call' client server
        for netid in tcp rdma; do
            for what in 'null 0' 'write 65536' 'read 65536'; do
                system_calls $netid $what && printf '%-24s %12s %12s\n' "$netid $what" "$client_calls" "$server_calls"
            done
        done
        echo
    fi
    echo "rdma, per call:    copied bytes          read-ahead bytes       registrations          Sends           data system calls"
    printf '%-14s %22s %22s %17s %17s %17s\n' '' 'client / server' 'client / server' 'client / server' 'client / server' 'client / server'
    for what in 'null 0' 'write 4096' 'read 4096' 'write 65536' 'read 65536' 'write 1048576' 'read 1048576'; do
        # shellcheck disable=SC2046,SC2086
        printf '%-14s %10s / %9s %10s / %9s %7s / %7s %7s / %7s %7s / %7s\n' "$what" \
            $(${with[rdma]} "$scratch/bench" counters rdma "${port_of[rdma]}" $what "$some")
    done
    echo
    for netid in tcp rdma; do
        before=$(ticks "${server_of[$netid]}")
        sleep 1
        after=$(ticks "${server_of[$netid]}")
        echo "idle server on $netid: $(awk -v b="$before" -v a="$after" -v hz="$(getconf CLK_TCK)" 'BEGIN {
            split(b, x, " "); split(a, y, " "); printf "%d ms user, %d ms system in one second", (y[1] - x[1]) * 1000 / hz, (y[2] - x[2]) * 1000 / hz }')"
    done
}

# system_calls NETID OP SIZE: the difference between one run and one twice as long, so that starting does not count.
system_calls() {
    local netid=$1 count traced
    local -A client=() server_side=()
    for count in "$some" $((2 * some)); do
        rm -f "$scratch/s.strace" "$scratch/c.strace"
        start_ready strace -f -c -o "$scratch/s.strace" -E LD_PRELOAD="$([ "$netid" = rdma ] && echo "$LIBRPCRDMA")" \
            "$scratch/bench" server "$netid" 2>/dev/null || return 1
        traced=$(cat "/proc/$server/task/$server/children")
        strace -f -c -o "$scratch/c.strace" -E LD_PRELOAD="$([ "$netid" = rdma ] && echo "$LIBRPCRDMA")" \
            "$scratch/bench" calls "$netid" "$port" "$2" "$3" "$count" 2>/dev/null || return 1
        kill $traced 2>/dev/null
        wait "$server" 2>/dev/null
        server_side[$count]=$(awk '$NF == "total" { print $(NF == 6 ? 4 : NF - 1); exit }' "$scratch/s.strace")
        client[$count]=$(awk '$NF == "total" { print $(NF == 6 ? 4 : NF - 1); exit }' "$scratch/c.strace")
    done
    client_calls=$(awk -v a="${client[$some]}" -v b="${client[$((2 * some))]}" -v n="$some" 'BEGIN { printf "%.1f", (b - a) / n }')
    server_calls=$(awk -v a="${server_side[$some]}" -v b="${server_side[$((2 * some))]}" -v n="$some" 'BEGIN { printf "%.1f", (b - a) / n }')
}

table >"$scratch/table"
cat "$scratch/table"
[ -z "$report" ] || cp "$scratch/table" "$report"
