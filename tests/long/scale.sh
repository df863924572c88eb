#!/bin/bash
# scale.sh [COUNT...]: COUNT (100 1000 10000) idle connections beside one client that calls (c-tests/scale.c): the time of its
# calls, the server's memory and mappings, the time to connect and to close; with stock tcp's figures for comparison. Then
# connections that never send anything, and a server that has no descriptors left.
#
# 10000 need a limit of descriptors (ulimit -Hn) of 10100; with a lower limit there are fewer connections.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
cd "$scratch" || exit 1
[ $# -gt 0 ] || set -- 100 1000 10000
ulimit -Sn "$(ulimit -Hn)"
most=$(ulimit -Sn)
[ "$most" != unlimited ] || most=1048576

for program in bench/bench.c c-tests/scale.c; do
    cc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread -o "$(basename "$program" .c)" "$top/$program" \
        $(pkg-config --cflags --libs libtirpc) 2>cc.log || { FAIL "$program compiles" cc.log; closing; }
done
declare -A with=([tcp]=env [rdma]="${preloaded[*]}")
# below A B FACTOR: whether A is at most B * FACTOR.
below() { awk -v a="$1" -v b="$2" -v f="$3" 'BEGIN { exit !(a <= b * f) }'; }
# check TEXT CONDITION...
check() { local text=$1; shift; if "$@"; then ok "$text"; else FAIL "$text"; fi; }
# scale NETID WHAT COUNT: runs it with a server of its own.
scale() {
    # shellcheck disable=SC2086
    start_ready ${with[$1]} ./bench server "$1" || { FAIL "a server on $1"; closing; }
    # shellcheck disable=SC2086
    timeout "$(patient 600)" ${with[$1]} ./scale "$2" "$1" "$port" "$server" "$3" 2>err || { FAIL "$1: $2 $3" err; closing; }
    stop "$server"
}

for count in "$@"; do
    [ "$count" -le $((most - 100)) ] || count=$((most - 100))
    for netid in tcp rdma; do
        read -r alone beside after connect close kib idle gone maps many _ < <(scale "$netid" idle "$count")
        each=$(((idle - kib) / count))
        text="$netid: beside $count idle connections"
        echo "      $text: null call $beside us (alone $alone, then $after); connect with a call $connect us, close $close us;" \
            "$each KiB each ($kib, $idle, then $gone KiB); $maps, then $many mappings"
        [ $netid = rdma ] || continue
        check "$text a call takes at most 1.2 times as long" below "$beside" "$alone" 1.2
        check "$text each has at most 64 KiB" [ "$each" -le 64 ]
        check "$text there are at most 2 mappings for 64 of them" [ $((many - maps)) -le $((count / 32 + 16)) ]
    done
done

# Each count has a fresh server; here all rounds have the same one.
start_ready "${preloaded[@]}" ./bench server rdma || { FAIL "a server"; closing; }
for round in 1 2 3 4; do
    read -r _ _ _ _ _ _ idle gone _ _ left < <("${preloaded[@]}" ./scale idle rdma "$port" "$server" 2500)
    echo "      2500 connections, round $round: $idle KiB, then $gone KiB and $left mappings"
    [ $round -gt 1 ] || first=$gone
done
check "10000 connections made and closed leave nothing behind" [ "$gone" -le $((first + first / 20)) ]
stop "$server"

silent=$((most > 6200 ? 5000 : (most - 200) * 5 / 6))
read -r alone beside after closed < <(scale rdma silent $silent)
echo "      beside $silent silent connections: null call $beside us (alone $alone, then $after)"
check "silent connections make a call at most 1.2 times as long" below "$beside" "$alone" 1.2
check "silent connections, and those of one byte, are closed" [ "$closed" = 1 ]

ulimit -Sn 128
start_ready "${preloaded[@]}" ./bench server rdma || { FAIL "a server with few descriptors"; closing; }
ulimit -Sn "$most"
read -r first then < <("${preloaded[@]}" ./scale full rdma "$port" "$server" 400)
stop "$server"
check "a server without descriptors serves whom it has ($first), and others when these are gone ($then)" \
    [ "$first" -ge 80 -a "$then" -ge "$((first - 2))" ]
closing
