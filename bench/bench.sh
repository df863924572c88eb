#!/bin/bash
# bench.sh [FILE]: tcp (stock libtirpc, nothing preloaded) against rdma (the library preloaded), in one run; and "placed":
# rdma with a text binding for the benchmark's program at both ends, so that its data goes into chunks of its own; and
# "two": rdma, and two threads of the server serve (rpcrdma_svc_run). These go over software iWARP, as between two hosts without
# adapters; "local" and "local-placed" through memory that both ends share.
#
# Then calls whose routine computes, sleeps, or takes that many bytes and waits a millisecond, with one service thread, two and
# sixteen.
#
# Then Version Two with 16 KiB of data: Receives of 4 KiB and of 64 KiB, and replies that invalidate or do not.
#
# Every case is measured several times; tcp and rdma take turns, so that whatever else the machine does hits both;
# the table shows medians. Then: system calls per call (if strace is there), and the processor time of an idle server.
# With FILE the table is written there too, and beside it, named alike, the rows of CLIENTs of their own as JSON, and drawn
# (`rpcrdma perf --draw`): FILE.txt, FILE.json, FILE.svg. QUICK=1 takes a few seconds and shows only that everything runs.
# ROUNDS (7) is how often each case is measured.
# RPCRDMA_* set by the caller (RPCRDMA_POLL=0 ...) reach the rdma side.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../tests/lib.sh"
report=${1:+$(realpath -m "$1")}
[ -r "$LIBRPCRDMA" ] || { echo "bench: $LIBRPCRDMA is missing: run make first" >&2; exit 1; }

if [ -n "${QUICK:-}" ]; then repeats=1 seconds=0.05 some=100 many=(4); else repeats=${ROUNDS:-7} seconds=0.25 some=1000 many=(4 16); fi
cc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread $(pkg-config --cflags libtirpc) -o "$scratch/bench" \
    "$here/bench.c" $(pkg-config --libs libtirpc) || exit 1

cc -O2 -Wall -Wextra -Werror -shared -fPIC -o "$scratch/copies.so" "$here/copies.c" || exit 1
cat >"$scratch/bench.conf" <<'END'
0x20004245 1 1 arguments=data results=int
0x20004245 1 2 arguments=count results=data preset
END

# A way to run: netid, prefix, and the same with the counter of copies.
declare -A netid_of=([tcp]=tcp [rdma]=rdma [placed]=rdma [two]=rdma [sixteen]=rdma [local]=rdma [local-placed]=rdma
    [asleep]=rdma [4K]=rdma [64K]=rdma [4K-local]=rdma) port_of server_of
version_two=(4K 64K 4K-local)
declare -A with=([tcp]=env [rdma]="${preloaded[*]}" [placed]="${preloaded[*]} RPCRDMA_BINDINGS=$scratch/bench.conf IN_PLACE=1"
    [two]="${preloaded[*]} THREADS=2" [sixteen]="${preloaded[*]} THREADS=16")
with[local]="${with[rdma]} RPCRDMA_PROVIDER=local" with[local-placed]="${with[placed]} RPCRDMA_PROVIDER=local"
with[asleep]="${with[local]} RPCRDMA_POLL=0"
for size in 4K 64K; do
    with[$size]="${preloaded[*]} RPCRDMA_VERSION=2 RPCRDMA_INLINE=$size RPCRDMA_MAX_REPLY=32K"
done
with[4K-local]="${with[4K]} RPCRDMA_REMOTE_INVALIDATION=no"
declare -A counted=([tcp]="env LD_PRELOAD=$scratch/copies.so")
for way in rdma placed; do counted[$way]="${with[$way]} LD_PRELOAD=$scratch/copies.so:$LIBRPCRDMA"; done
serve() { # WAY PREFIX...
    local way=$1
    shift
    start_ready "$@" "$scratch/bench" server "${netid_of[$way]}" || { echo "bench: no server for $way" >&2; exit 1; }
}
for way in tcp rdma placed two sixteen local local-placed asleep "${version_two[@]}"; do
    serve $way ${with[$way]}
    port_of[$way]=$port server_of[$way]=$server
done

# measure KEY WAY OP SIZE THREADS shared|own|processes
measure() {
    local key=$1 way=$2 line
    shift 2
    line=$(${with[$way]} "$scratch/bench" client ${netid_of[$way]} "${port_of[$way]}" "$@" $seconds) ||
        { echo "bench: $way $* failed" >&2; exit 1; }
    echo "${key// /-} $way $line" >>"$scratch/results"
}

# fair KEY WAY THREADS shared|own
fair() {
    local key="fair $1" way=$2 line
    shift 2
    line=$(${with[$way]} "$scratch/bench" fair ${netid_of[$way]} "${port_of[$way]}" "$@" $((some / 20))) ||
        { echo "bench: fair $way $* failed" >&2; exit 1; }
    echo "${key// /-} $way $line" >>"$scratch/results"
}

cases=()
for what in 'null 0' 'write 4096' 'read 4096' 'write 65536' 'read 65536' 'write 1048576' 'read 1048576'; do
    cases+=("$what 1 own")
    for threads in "${many[@]}"; do
        for how in own processes shared; do cases+=("$what $threads $how"); done
    done
done
busy=('1 own' '4 own' '32 own' '32 shared')
working=('compute 200 1 own' 'compute 200 4 own' 'compute 200 4 shared' 'sleep 1000 1 own' 'sleep 1000 32 shared'
    'store 1048576 16 own' 'store 1048576 16 shared')
for ((repeat = 0; repeat < repeats; repeat++)); do
    for i in "${!cases[@]}"; do
        for way in tcp rdma two placed local local-placed asleep; do
            [[ $way != *placed || ${cases[$i]} =~ 65536|1048576 ]] || continue
            [[ $way != asleep || ${cases[$i]} =~ ^null.*own ]] || continue
            measure "$i" $way ${cases[$i]}
        done
    done
    for how in "${busy[@]}"; do
        for way in tcp rdma two sixteen; do fair "$how" $way $how; done
    done
    for what in "${working[@]}"; do
        # shellcheck disable=SC2086
        for way in rdma two sixteen; do measure "$what" $way $what; done
    done
    for what in write read; do
        for way in tcp "${version_two[@]}"; do measure 16K-$what $way $what 16384 1 own; done
    done
done
median() { # CASE WAY COLUMN
    awk -v c="${1// /-}" -v n="$2" -v k="$3" '$1 == c && $2 == n { print $k }' "$scratch/results" | sort -n |
        awk '{ v[NR] = $1 } END { if (NR) print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}
# Clock ticks that a process has used, user and system.
ticks() { awk '{ sub(/.*\) /, ""); print $12, $13 }' "/proc/$1/stat"; }

table() {
    echo "$(date -u +%Y-%m-%d), $(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r), loopback"
    echo "medians of $repeats runs of $seconds s each, tcp and rdma in turn$(env | sed -n 's/^LIBRPCRDMA=.*//; s/^RPCRDMA_PROVIDER=.*//; s/^\(RPCRDMA_[A-Z_]*=.*\)/, \1/p' | tr -d '\n')"
    echo
    printf '%-5s %7s %7s %-9s %9s %9s %6s %9s %6s %9s %6s %9s %6s %7s %6s %14s %6s %9s %6s\n' call bytes threads CLIENTs 'tcp per s' 'rdma' \
        ratio 'tcp p50' ratio 'tcp p99' ratio 'tcp p99.9' ratio 'tcp cpu' ratio 'placed per s' ratio 'two per s' ratio
    ratio() { awk -v t="$1" -v r="$2" 'BEGIN { if (r != "" && r != "-") printf "%.2f", t ? r / t : 0 }'; }
    for i in "${!cases[@]}"; do
        local -A of=()
        for way in tcp rdma placed two; do
            for column in 3 4 5 6 9; do of[$way$column]=$(median "$i" $way $column); done
        done
        # shellcheck disable=SC2086
        set -- ${cases[$i]} "${of[tcp3]}" "${of[rdma3]}"
        for column in 3 4 5 9 6; do
            [ $column -eq 3 ] || set -- "$@" "${of[tcp$column]}"
            set -- "$@" "$(ratio "${of[tcp$column]}" "${of[rdma$column]}")"
        done
        printf '%-5s %7s %7s %-9s %9s %9s %6s %9s %6s %9s %6s %9s %6s %7s %6s %14s %6s %9s %6s\n' "$@" "${of[placed3]:--}" \
            "$(ratio "${of[tcp3]}" "${of[placed3]:--}")" "${of[two3]}" "$(ratio "${of[tcp3]}" "${of[two3]}")"
    done
    echo "per s: calls per second; p50, p99, p99.9: microseconds that half, 99 % and 99.9 % of the calls take at most; cpu:"
    echo "microseconds of processor time, of both ends, per call; ratio: rdma / tcp; placed: rdma with a binding, the data in"
    echo "chunks of its own; two: rdma, two service threads. Of threads that share a CLIENT over tcp one may have it for long:"
    echo "the others wait then, in fewer calls than p99 shows"
    echo
    echo "the same through memory that both ends share; placed: with a binding, beside the same of tcp"
    printf '%-5s %7s %7s %-9s %9s %6s %7s %6s %7s %6s %6s %6s %9s %6s %6s %6s\n' call bytes threads CLIENTs 'per s' ratio \
        p50 ratio p99 ratio cpu ratio 'placed' ratio p50 cpu
    for i in "${!cases[@]}"; do
        # shellcheck disable=SC2086
        set -- ${cases[$i]}
        for column in 3 4 5 6; do
            set -- "$@" "$(median "$i" local $column)" "$(ratio "$(median "$i" tcp $column)" "$(median "$i" local $column)")"
        done
        local placed
        placed=$(median "$i" local-placed 3)
        set -- "$@" "${placed:--}"
        for column in 3 4 6; do
            set -- "$@" "$(ratio "$(median "$i" tcp $column)" "$(median "$i" local-placed $column)")"
        done
        printf '%-5s %7s %7s %-9s %9s %6s %7s %6s %7s %6s %6s %6s %9s %6s %6s %6s\n' "$@"
    done
    echo
    echo "the same where nobody polls (RPCRDMA_POLL=0)"
    for i in "${!cases[@]}"; do
        [[ ${cases[$i]} =~ ^null.*own ]] || continue
        # shellcheck disable=SC2086
        set -- ${cases[$i]}
        for column in 3 4 5 6; do
            set -- "$@" "$(median "$i" asleep $column)" "$(ratio "$(median "$i" tcp $column)" "$(median "$i" asleep $column)")"
        done
        printf '%-5s %7s %7s %-9s %9s %6s %7s %6s %7s %6s %6s %6s\n' "$@"
    done
    echo
    echo "calls per second whose routine computes or sleeps for so many microseconds, or takes so many bytes and sleeps for 1000,"
    echo "by service threads"
    printf '%-8s %9s %7s %-9s %9s %9s %6s %9s %6s\n' call 'us, bytes' threads CLIENTs one two ratio sixteen ratio
    for what in "${working[@]}"; do
        local one two sixteen
        one=$(median "$what" rdma 3) two=$(median "$what" two 3) sixteen=$(median "$what" sixteen 3)
        # shellcheck disable=SC2086
        printf '%-8s %9s %7s %-9s %9s %9s %6s %9s %6s\n' $what "$one" "$two" "$(ratio "$one" "$two")" \
            "$sixteen" "$(ratio "$one" "$sixteen")"
    done
    echo
    echo "Version Two, 16 KiB of data, one thread, replies of at most 32 KiB; Receives of so many bytes at both ends;"
    echo "-local: replies do not invalidate; else they do where their call names one handle, as those of read do"
    printf '%-6s %-9s %10s %7s %12s %14s %14s %11s\n' call Receives us ratio 'round trips' registrations 'pulled bytes' 'pushed bytes'
    for what in write read; do
        for way in "${version_two[@]}"; do
            # A call and its reply are a round trip, the RDMA Reads of a Call are another one. An RDMA Write goes with the reply.
            # shellcheck disable=SC2046,SC2086
            set -- $(${with[$way]} "$scratch/bench" counters rdma "${port_of[$way]}" $what 16384 "$some")
            printf '%-6s %-9s %10s %7s %12s %14s %14s %11s\n' $what $way "$(median 16K-$what $way 4)" \
                "$(ratio "$(median 16K-$what tcp 3)" "$(median 16K-$what $way 3)")" \
                "$(awk -v pulled="${12}" 'BEGIN { print 1 + (pulled > 0) }')" "${5}" "${12}" "${14}"
        done
    done
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
    echo "per call, from the library's counters, client / server:"
    printf '%-21s %20s %18s %13s %11s %17s\n' '' 'copied bytes' 'read-ahead bytes' registrations Sends 'data system calls'
    for way in rdma placed; do
        for what in 'null 0' 'write 4096' 'read 4096' 'write 65536' 'read 65536' 'write 1048576' 'read 1048576'; do
            [[ $way != placed || $what =~ 65536|1048576 ]] || continue
            # shellcheck disable=SC2046,SC2086
            printf '%-21s %9s / %8s %7s / %8s %4s / %6s %4s / %4s %7s / %7s\n' "$way $what" \
                $(${with[$way]} "$scratch/bench" counters rdma "${port_of[$way]}" $what "$some" | cut -d' ' -f1-10)
        done
    done
    echo
    echo "bytes moved by memcpy and memmove per call, counted by a preloaded library:"
    printf '%-21s %10s %10s %10s\n' '' client server both
    for way in tcp rdma placed; do
        serve $way ${counted[$way]}
        for what in 'write 1048576' 'read 1048576'; do
            # shellcheck disable=SC2086
            ${counted[$way]} "$scratch/bench" counters ${netid_of[$way]} "$port" $what "$some" |
                awk -v n="$way $what" '{ printf "%-21s %10.0f %10.0f %10.0f\n", n, $15, $16, $15 + $16 }'
        done
        stop "$server"
    done
    echo
    echo "microseconds of a null call while another program has so many calls of 5 ms under way; medians of $repeats runs;"
    echo "two, sixteen: rdma, so many service threads"
    printf '%-24s %9s %9s %6s %9s %9s\n' '' tcp rdma ratio two sixteen
    for how in "${busy[@]}"; do
        printf '%-24s %9s %9s %6s %9s %9s\n' "$how" "$(median "fair $how" tcp 3)" "$(median "fair $how" rdma 3)" \
            "$(ratio "$(median "fair $how" tcp 3)" "$(median "fair $how" rdma 3)")" \
            "$(median "fair $how" two 3)" "$(median "fair $how" sixteen 3)"
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

# The rows of one thread and of the most, as `rpcrdma perf` would write them.
figures() {
    local i what size threads how way sep=
    quoted() { printf '"%s"' "$(tr -d '"\\\000-\037' <<<"$1")"; }
    printf '{"title": "RPC over tcp and over rdma, within one host", "notes": [%s, %s],\n' \
        "$(quoted "$(sed -n 1p "$scratch/table")")" "$(quoted "$(sed -n 2p "$scratch/table")")"
    printf '"ways": [{"name": "tcp", "what": "stock libtirpc"}, {"name": "rdma", "what": "software iWARP"}, {"name": "local", "what": "shared memory"}],\n'
    printf '"rows": ['
    for i in "${!cases[@]}"; do
        read -r what size threads how <<<"${cases[$i]}"
        [[ $how = own && " 1 ${many[-1]} " = *" $threads "* ]] || continue
        printf '%s\n{"call": "%s", "bytes": %s, "threads": %s, "ways": {' "$sep" "$what" "$size" "$threads"
        sep=,
        for way in tcp rdma local; do
            [ $way = tcp ] || printf ', '
            printf '"%s": {"rounds": %s, "calls_per_second": %s, "cpu_us": %s, "latency_us": {"p50": %s, "p99": %s, "p10": %s, "p90": %s, "p999": %s}}' \
                $way "$repeats" "$(median "$i" $way 3)" "$(median "$i" $way 6)" "$(median "$i" $way 4)" "$(median "$i" $way 5)" \
                "$(median "$i" $way 7)" "$(median "$i" $way 8)" "$(median "$i" $way 9)"
        done
        printf '}}'
    done
    printf '\n]}\n'
}

table >"$scratch/table"
cat "$scratch/table"
if [ -n "$report" ]; then
    cp "$scratch/table" "$report" && figures >"${report%.txt}.json" &&
        "${TOOL:-$top/build/rpcrdma}" perf --draw "${report%.txt}.json" --svg "${report%.txt}.svg" || exit 1
fi
