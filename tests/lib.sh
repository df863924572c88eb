# Sourced by the shell tests, the demo and the benchmark: a scratch directory that always goes away, children that
# always end, result lines that all look alike, and the one place that knows how the library is loaded into a program
# and what its log looks like.
#
# LIBRPCRDMA names the library (default: build/librpcrdma.so.0). Needs bash.
set -u
export LC_ALL=C
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${TEST_DEFAULTS:-}" ] && [ -f "$0" ]; then
    exec bash "$top/tests/defaults.sh" bash "$0" "$@"
fi
LIBRPCRDMA=$(realpath -m "${LIBRPCRDMA:-$top/build/librpcrdma.so.0}")
export LIBRPCRDMA
unset RPCRDMA_REDIRECT RPCRDMA_LOG RPCRDMA_FALLBACK
# Nobody reads what is not freed, which would be looked for at the end of each process; and to know what was inlined takes a
# third of a second at the start of each. A report of an error then names the function that is really there.
export VALGRIND_OPTS="--read-inline-info=no --memcheck:leak-check=no ${VALGRIND_OPTS:-}"
# Two ends on one host would share memory, but most tests are about what goes over a network.
export RPCRDMA_PROVIDER=${RPCRDMA_PROVIDER-iwarp}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/rpcrdma.XXXXXX")
children=()
passed=0 failed=0 skipped=0

clean_up() {
    local pid
    for pid in "${children[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in "${children[@]}"; do wait "$pid" 2>/dev/null; done
    cd / && rm -rf "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# The result lines. FAIL takes an optional file whose last lines tell why.
ok()   { passed=$((passed + 1)); echo "ok    $1"; }
skip() { skipped=$((skipped + 1)); echo "skip  $1 (${2:-})"; }
FAIL() {
    failed=$((failed + 1)); echo "FAIL  $1"
    if [ -n "${2:-}" ] && [ -s "$2" ]; then tail -n 20 "$2" | sed 's/^/      | /'; fi
}
# Ends the script with the closing line.
closing() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]; exit
}

# patient SECONDS: prints a time limit, which is longer on a machine that is busy with other things: multiplied by
# TEST_PATIENCE, or else by the load per processor if that is above three; up to three may be the tests' own.
patient() {
    local load
    read -r load _ </proc/loadavg
    awk -v limit="$1" -v factor="${TEST_PATIENCE:-}" -v load="$load" -v processors="$(nproc)" 'BEGIN {
        if (factor == "") factor = load > 3 * processors ? load / processors : 1
        printf "%d\n", limit * factor }'
}

# wait_for SECONDS COMMAND...: for programs that do not say when they are ready. Polls until COMMAND succeeds, for at most
# SECONDS, extended as by patient().
wait_for() {
    local end=$((${EPOCHREALTIME/./} + $(patient "$1") * 1000000)); shift
    while ! "$@" >/dev/null 2>&1; do
        [ "${EPOCHREALTIME/./}" -lt "$end" ] || return 1
        sleep 0.05
    done
}

# start_ready COMMAND...: starts a server of ours and returns when it has printed "READY port". Sets server, port.
# Its standard error goes to $log, if that is set.
start_ready() {
    local fd word
    exec {fd}< <(exec "$@" 2>>"${log:-/dev/stderr}")
    server=$!; children+=("$server"); port=
    read -r -t "$(patient 30)" -u "$fd" word port || true
    # The pipe stays open, so that a server that prints later does not die of SIGPIPE.
    [ "${word:-}" = READY ] && [ -n "$port" ]
}

# start_silent: a peer that accepts connections and says nothing. Sets server, port.
start_silent() {
    start_ready python3 -c '
import socket
listener = socket.create_server(("127.0.0.1", 0))
print("READY", listener.getsockname()[1], flush=True)
peers = []
while True:
    peers.append(listener.accept())'
}

# capture_start FILE [FILTER]: captures the loopback until capture_stop. False if dumpcap does not start.
# dumpcap says that it captures before it does. A datagram of ours in the file shows that it has begun, and another one
# that it has written everything before that.
capture_start() {
    captured=$1
    dumpcap -q -i lo -B 64 ${2:+-f "($2) or udp port 9"} -w "$captured" 2>"$captured.log" &
    dumpcap=$!; children+=("$dumpcap")
    wait_for 10 capture_has capture-begins
}
capture_has() { echo "$1" >/dev/udp/127.0.0.1/9; grep -qs "$1" "$captured"; }
capture_stop() {
    wait_for 10 capture_has capture-ends
    kill -INT "$dumpcap"; wait "$dumpcap" 2>/dev/null
    grep -Eq 'dropped on interface.*: [0-9]+/0 ' "$captured.log"
}
# read_frames OPTION...: tshark. The contents of a stream take precedence over its ports, which may be another protocol's (639,
# which root's clients may use, is MSDP's); and frames sent by two processors may be captured out of order.
read_frames() {
    tshark -n -o tcp.try_heuristic_first:TRUE -o tcp.reassemble_out_of_order:TRUE "$@" 2>/dev/null
}

# stop PID: ends a child and waits for its end.
stop() { kill "$1" 2>/dev/null; wait "$1" 2>/dev/null; return 0; }

# Prefixes for a command: preloaded, for programs that name netid "rdma" themselves; and moved, for programs that know
# only "tcp".
preloaded=(env LD_PRELOAD="$LIBRPCRDMA")
moved=(env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp)

# report NAME COMMAND...: passes on the lines "ok" and "skip" of a program, which must succeed within $limit seconds (300), and
# write nothing to stderr.
report() {
    local name=$1 line reason status; shift
    timeout -k 5 "$(patient "${limit:-300}")" "$@" >out 2>err
    status=$?
    while read -r line; do
        case $line in
        ok*) ok "$name: ${line#ok    }" ;;
        skip*)
            line=${line#skip  } reason=
            [[ $line != *' ('*')' ]] || { reason=${line##*' ('}; line=${line%' ('*}; }
            skip "$name: $line" "${reason%)}" ;;
        esac
    done <out
    [ "$status" -eq 0 ] && [ ! -s err ] || { cat out >>err; FAIL "$name: ends well and in silence (status $status)" err; }
}

# spoke_rdma LOG: does this log (RPCRDMA_LOG=info) say that a connection was made over RDMA?
# fell_back LOG: does it say that tcp was taken instead?
rdma_line='goes over rdma'
tcp_line='goes over tcp'
spoke_rdma() { grep -Eiq "$rdma_line" "$1"; }
fell_back() { grep -Eiq "$tcp_line" "$1"; }
