#!/bin/bash
# perf.sh: `rpcrdma perf` and `rpcrdma decode` as a user runs them: within this host and to a server that somebody has started, over
# tcp and rdma; what is printed is compared with the counters of the libraries at both ends, and with their log.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
tool=${TOOL:-$top/build/rpcrdma}
[ -x "$tool" ] || { FAIL "$tool is missing: run make first"; closing; }
unset RPCRDMA_PROVIDER
cd "$scratch" || exit 1
quick=(--seconds 0.02 --rounds 2)

# check NAME STATUS PATTERN COMMAND...: the command must end with STATUS, and its output, joined to one line, match PATTERN.
check() {
    local name=$1 status=$2 pattern=$3 found
    shift 3
    timeout -k 5 "$(patient 60)" "$@" >out 2>&1
    found=$?
    if [ "$found" -eq "$status" ] && { tr '\n' ' ' <out; echo; } | grep -Eq -- "$pattern"; then ok "$name"; else FAIL "$name (status $found)" out; fi
}
# value FILE NAME [N]: the N-th number of that name in a JSON document.
value() { sed -n 's/^ *"'"$2"'": \([0-9.]*\),\{0,1\}$/\1/p' "$1" | sed -n "${3:-1}p"; }
equal() { if [ -n "$2" ] && [ "$2" = "$3" ]; then ok "$1"; else FAIL "$1: $2 and $3"; fi; }

# ----------------------------------------------------------------------------------------------------------------- perf

for device in iwarp local; do
    case $device in iwarp) words='software iWARP' ;; local) words='shared memory' ;; esac
    if timeout -k 5 "$(patient 60)" "$tool" perf "${quick[@]}" --sizes 0,4K,256K --threads 1,3 --device $device --json --svg $device.svg \
        >$device.json 2>err && [ ! -s err ]; then
        ok "within this host, $device"
    else
        FAIL "within this host, $device" err
    fi
    check "$device is named" 0 "\"what\": \"librpcrdma, $words" cat $device.json
    equal "$device: rows" "$(grep -c '"threads"' $device.json)" 10
    equal "$device: every row has both ways" "$(grep -c '"calls_per_second": [1-9]' $device.json)" 20
    # The counters begin anew behind "totals": the table's own count, then the client's and the server's.
    sed -n '/"totals"/,$p' $device.json >totals
    equal "$device: calls counted by the benchmark and by the client's library" "$(value totals calls)" "$(value totals calls 2)"
    equal "$device: calls counted by the server's library" "$(value totals calls)" "$(value totals served 2)"
    equal "$device: Sends of the server" "$(value totals calls)" "$(value totals sends 2)"
    if [ "$(value totals bytes_read 2)" -ge 262144 ] && [ "$(value totals bytes_written 2)" -ge 262144 ]; then
        ok "$device: long data has gone by RDMA"
    else
        FAIL "$device: long data has gone by RDMA" totals
    fi
    if grep -q '^</svg>$' $device.svg && ! grep -q 'NaN' $device.svg; then ok "$device: drawn"; else FAIL "$device: drawn" $device.svg; fi
done
# Ratios of the table, of the picture, and of the figures: the same; and what is drawn can be rendered.
ratios() { python3 -c 'import json, sys
for row in json.load(open(sys.argv[1]))["rows"]:
    print("%.2f" % (row["ways"]["rdma"]["calls_per_second"] / row["ways"]["tcp"]["calls_per_second"]))' "$1" | xargs; }
for device in iwarp local; do
    equal "$device: ratios in the picture" "$(sed -n 's/^\([0-9]*\.[0-9][0-9]\)$/\1/p' $device.svg | xargs)" "$(ratios $device.json)"
    equal "$device: ratios in the table" "$("$tool" perf --draw $device.json | awk '$1 == "rdma" { print $3 } $4 == "rdma" { print $6 }' | xargs)" "$(ratios $device.json)"
    if command -v rsvg-convert >/dev/null && command -v file >/dev/null; then
        check "$device: rendered" 0 'PNG image data, 960 x [0-9]+' sh -c "rsvg-convert $device.svg -o $device.png && file $device.png"
    fi
done
# If the picture cannot be written, this is reported before anything is measured, which would take an hour.
mkdir folder; echo mine >kept; echo mine >locked; chmod 444 locked
long=(--seconds 3600 --rounds 1 --sizes 0 --threads 1)
unprivileged=()
[ "$(id -u)" -ne 0 ] || unprivileged=(setpriv --bounding-set=-all --inh-caps=-all)
for wrong in 'none/a.svg:No such file or directory' 'folder:Is a directory' 'kept/a.svg:Not a directory' 'locked:Permission denied'; do
    check "a picture that cannot be written: ${wrong#*:}" 1 "^rpcrdma perf: ${wrong%%:*}: ${wrong#*:} \$" "${unprivileged[@]}" "$tool" perf "${long[@]}" --svg "${wrong%%:*}"
    check "... of a log" 1 "^rpcrdma decode: ${wrong%%:*}: ${wrong#*:} \$" "${unprivileged[@]}" "$tool" decode --svg "${wrong%%:*}" /dev/zero
done
check "a run that fails" 1 'no\.such\.host\.invalid: ' "$tool" perf no.such.host.invalid --svg kept
check "... leaves the picture of before" 0 '^mine $' cat kept
check "... and makes none" 1 'no\.such\.host\.invalid: ' "$tool" perf no.such.host.invalid --svg new.svg
if [ -e new.svg ]; then FAIL "... and makes none: it is there"; fi
# On a screen: a progress bar, then the table; what rdma will do here.
if command -v tmux >/dev/null; then
    export TERM=xterm
    mux() { tmux -L "rpcrdma-perf$$" -f /dev/null "$@"; }
    screen() { mux capture-pane -p >screen; grep -Eq -- "$1" screen; }
    mux new-session -d -x 100 -y 70 'bash --norc --noprofile'
    mux send-keys -l "clear; '$tool' perf --seconds 0.5 --rounds 4 --sizes 0,64K --threads 1 --device iwarp; echo status \$?"; mux send-keys Enter
    wait_for 20 screen '^\[=*>? *\] [0-9]+/24 .* left: (null 0|write 64K|read 64K) over (tcp|rdma), threads: 1' &&
        ok "a bar tells how far it is" || FAIL "a bar tells how far it is" screen
    wait_for 60 screen '^status 0' && ! screen ' left: ' && [ "$(grep -Ec '^(null|write|read) +(0|64K) +1  tcp ' screen)" -eq 3 ] &&
        [ "$(grep -Ec '^ +rdma +[0-9,.]+ +[0-9.]+ ' screen)" -eq 3 ] && ok "then the table is there" || FAIL "then the table is there" screen
    mux send-keys -l "clear; '$tool' info localhost; echo status \$?"; mux send-keys Enter
    wait_for 20 screen '^status [01]' && screen '^library +/' && screen '^ +iwarp .software iWARP.: can be used' && screen '^problems? ' &&
        ok "info on a screen" || FAIL "info on a screen" screen
    mux kill-server
else
    skip "perf in a terminal" "tmux is not installed"
fi
check "a document is drawn again" 0 '' "$tool" perf --draw iwarp.json --svg again.svg
check "... alike" 0 '^$' cmp iwarp.svg again.svg
check "a document is printed as a table" 0 'write +4K +1  tcp .* rdma .*ratio: rdma to tcp' "$tool" perf --draw iwarp.json
check "what is no document is named" 1 'iwarp.svg: not the figures of a benchmark' "$tool" perf --draw iwarp.svg

# A server that somebody has started.
exec {serving}< <(exec "$tool" perf --serve --listen 127.0.0.1 --port 0 --sizes 64K 2>server.err)
server=$!; children+=("$server")
read -r -t "$(patient 30)" -u "$serving" line
port=${line#*127.0.0.1:} port=${port%%:*}
if [[ $line == "serving at 127.0.0.1:"*", calls of up to 65,536 bytes; Ctrl-C ends it" ]]; then
    ok "a server says where it is"
else
    FAIL "a server says where it is: $line" server.err
fi
check "to a host" 0 'write +64K +2  tcp .* rdma ' "$tool" perf 127.0.0.1 -p "$port" "${quick[@]}" --sizes 64K --threads 2
check "more than the server takes" 1 'the server takes calls of up to 65536 bytes: start it with --sizes 131072' \
    "$tool" perf 127.0.0.1 -p "$port" --sizes 128K
check "another program's number" 1 'RPC: Program unavailable' "$tool" perf 127.0.0.1 -p "$port" --program 0x20000001 --sizes 0
# A client that goes away in the midst of a reply, or of anything else, does not end a server that others use.
for manner in reset close; do
    python3 - "$port" $manner <<'END' || FAIL "a client that goes: python3"
import socket, struct, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
call = struct.pack(">12I", 7, 0, 2, 0x20005045, 1, 2, 0, 0, 0, 0, 0, 65536)
peer.sendall((struct.pack(">I", 1 << 31 | len(call)) + call) * 200)
if sys.argv[2] == "reset":
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
peer.close()
END
    check "a client that goes in the midst of a reply ($manner)" 0 'null +0 +1 +tcp ' \
        "$tool" perf 127.0.0.1 -p "$port" "${quick[@]}" --sizes 0 --threads 1
done
stop "$server"
check "RPCRDMA_LIB is no setting" 0 'null +0 +1 +tcp ' env RPCRDMA_LIB=/nowhere "$tool" perf "${quick[@]}" --sizes 0 --threads 1
check "no server" 1 "Connection refused.*is .rpcrdma perf --serve. running there" "$tool" perf 127.0.0.1 -p "$port"
check "no host" 1 'no\.such\.host\.invalid: ' "$tool" perf no.such.host.invalid
check "a wrong size" 2 '4X.*a number of bytes from 0 to 256M' "$tool" perf --sizes 4X
check "an odd mixture" 2 'cannot be used with' "$tool" perf --serve somewhere

# Ctrl-C: what was measured is shown. The run would take a minute; a row of both ways takes 20 ms.
"$tool" perf --seconds 20 --rounds 1000 --sizes 0 --threads 1 --json >cut.json 2>cut.err &
run=$!; children+=("$run")
# Three connections: one that asks the server for its state, and one for each transport.
running() { [ "$(find /proc/$run/fd -lname 'socket:*' | wc -l)" -ge 3 ]; }
wait_for 10 running
# Both transports have had a round when the threads have used this much time.
used() { [ "$(awk '{ print $14 + $15 }' "/proc/$run/stat")" -ge 20 ]; }
wait_for 20 used
its_server=$(cat "/proc/$run/task/$run/children")
kill -INT "$run"
wait "$run"; status=$?
if [ $status -eq 0 ] && grep -q '"interrupted": true' cut.json && [ ! -s cut.err ]; then
    ok "Ctrl-C ends it with what was measured"
else
    FAIL "Ctrl-C ends it with what was measured (status $status)" cut.err
fi
# In that file a space follows each process id.
gone() { [ -n "$its_server" ] && [ ! -e "/proc/${its_server% }/fd/0" ]; }
if wait_for 5 gone; then ok "its server has gone with it"; else FAIL "its server has gone with it: $its_server"; fi

# A signal ends a run at once, though the host is silent, from the beginning or in the midst of it: a reply would be waited for
# half a minute.
# ends_within SECONDS SIGNAL STATUS NAME: ends `run`.
ends_within() {
    local began=${EPOCHREALTIME/./} status
    kill "-$2" "$run"; wait "$run"; status=$?
    if [ $status -eq "$3" ] && [ $((${EPOCHREALTIME/./} - began)) -lt $(($(patient "$1") * 1000000)) ]; then ok "$4"; else FAIL "$4 (status $status, $((${EPOCHREALTIME/./} - began)) us)" err; fi
}
start_silent || FAIL "a silent peer"
# One thread waits for signals.
asks() { ls -l "/proc/$run/fd" | grep -q socket: && [ "$(find "/proc/$run/task" -mindepth 1 -maxdepth 1 | wc -l)" -ge 2 ]; }
for signal in TERM INT; do
    "$tool" perf 127.0.0.1 -p "$port" >out 2>err & run=$!; children+=("$run")
    wait_for 10 asks
    ends_within 5 $signal $((128 + $(kill -l $signal))) "a host that is silent: SIG$signal ends it at once"
done
stop "$server"
start_ready "$tool" perf --serve --child --listen 127.0.0.1 --port 0 --sizes 0 || FAIL "a server"
for device in iwarp local; do
    "$tool" perf 127.0.0.1 -p "$port" --seconds 20 --rounds 1000 --sizes 0 --threads 1,2 --device $device >shown 2>err & run=$!; children+=("$run")
    wait_for 10 used
    kill -STOP "$server"
    ends_within 10 INT 0 "a host that has become silent ($device): Ctrl-C shows what was measured"
    check "... in its table" 0 'null +0 +1 +tcp .*Ended before its time' cat shown
    kill -CONT "$server"
done
stop "$server"

# --------------------------------------------------------------------------------------------------------------- decode

RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=$scratch/log "$tool" perf --seconds 0.002 --rounds 1 --sizes 0,256K --threads 1 --device iwarp --json >run.json 2>err ||
    FAIL "a run with a log" err
sed -n '/"totals"/,$p' run.json >totals
"$tool" decode log >decoded 2>err || FAIL "decode" err
calls=$(value totals calls)
equal "every call is in the log, with both its ends" "$(grep -c '^call [0-9].* us$' decoded)" "$calls"
equal "... each message has been sent and has come" "$(grep -c '^ .*[<>] RDMA_.*(there after ' decoded)" "$((2 * calls))"
equal "RDMA Reads, in bytes" "$(awk '/RDMA Read of/ { gsub(",", ""); n += $7 } END { print n + 0 }' decoded)" "$(value totals bytes_read 2)"
equal "RDMA Writes, in bytes" "$(awk '/RDMA Write of/ { gsub(",", ""); n += $7 } END { print n + 0 }' decoded)" "$(value totals bytes_written 2)"
check "nothing is passed over" 0 '^$' cat err
equal "as JSON" "$("$tool" decode --json <log | grep -c '"latency_us": [0-9]')" "$calls"
write=$(sed -n 's/^call \([0-9]*\) .* perf 1 WRITE .*/\1/p' decoded | head -n 1)
check "a call is drawn" 0 '' "$tool" decode --call "$write" --svg call.svg log
equal "... with what it says in words" "$(sed -n 's/^RDMA \(Read\|Write\): \([0-9,]*\) bytes.*/\1 \2/p' call.svg | xargs)" \
    "$("$tool" decode --call "$write" log | sed -n 's/.*RDMA \(Read\|Write\) of \([0-9,]*\) bytes.*/\1 \2/p' | xargs)"
if grep -q '^</svg>$' call.svg && grep -q 'grants 32 credits' call.svg; then ok "... as a diagram"; else FAIL "... as a diagram" call.svg; fi
xid=$(sed -n 's/^call 2 .* xid \(0x[0-9a-f]*\) .*/\1/p' decoded)
check "a call by its XID" 0 "call 2 .* xid $xid " "$tool" decode --xid "$xid" log
# The same from captured packets.
if [ "$(id -u)" -ne 0 ] || ! command -v dumpcap >/dev/null; then
    skip "a capture" "needs root and dumpcap"
else
    start_ready "$tool" perf --serve --child --listen 127.0.0.1 --port 0 --sizes 256K || FAIL "a server"
    capture_start "$scratch/capture" "tcp port $port" || FAIL "dumpcap starts" "$scratch/capture.log"
    "$tool" perf 127.0.0.1 -p "$port" --seconds 0.002 --rounds 1 --sizes 0,256K --threads 2 --device iwarp --json >run.json 2>err ||
        FAIL "a run that is captured" err
    capture_stop || skip "a capture without loss" "packets were dropped"
    stop "$server"
    sed -n '/"totals"/,$p' run.json >totals
    "$tool" decode capture >decoded 2>err || FAIL "decode a capture" err
    equal "a capture: every call, with its reply" "$(grep -c '^call [0-9].*perf 1 .* us$' decoded)" "$(value totals calls)"
    equal "a capture: RDMA Reads, in bytes" "$(awk '/RDMA Read of/ { gsub(",", ""); n += $7 } END { print n + 0 }' decoded)" "$(value totals bytes_read 2)"
    equal "a capture: RDMA Writes, in bytes" "$(awk '/RDMA Write of/ { gsub(",", ""); n += $7 } END { print n + 0 }' decoded)" "$(value totals bytes_written 2)"
    check "a capture: nothing is missing" 1 '^$' grep -E 'missing|not understood' decoded
    check "a capture: a call is drawn" 0 '' "$tool" decode --call 3 --svg call.svg capture
    grep -q '^</svg>$' call.svg || FAIL "a capture: a call is drawn" call.svg
    head -c $(($(wc -c <capture) * 9 / 10 + 1)) capture >part
    check "a capture that is cut short" 0 'packet at the end that is cut short' "$tool" decode part
fi
head -n 20 log | sed '2s/$/\x1b[31m/; 3s/^/noise /' >part
printf 'a line of mine\x1b]0;title\x07\n' >>part
check "what is not understood is named" 0 'lines that are not of the library.s log: 1 of 21; line 21 is the first: a line of mine\?\]0;title\?' "$tool" decode part
if grep -q $'\x1b' out; then FAIL "no escape sequence reaches a terminal" out; else ok "no escape sequence reaches a terminal"; fi
# A log is not kept in memory, and hardly anything of a call that is not asked for: memory in multiples of the log's size.
cat >size.py <<'END'
import os, subprocess, sys
at = "2026-11-22T09:30:00.%06dZ rpcrdma[%d] wire: fd 3 %s RDMA_MSG xid 0x%08x credits 32 reads [] writes [] reply none payload 40\n"
with open("long", "w") as log:
    for n in range(40000):
        for process, way in (1, ">"), (2, "<"), (2, ">"), (1, "<"):
            log.write(at % (n, process, way, n))
size = os.path.getsize("long")
for most, *options in (2.0,), (2.0, "--json"), (1.0, "--call", "5"):
    reader = subprocess.Popen([sys.argv[1], "decode", *options, "long"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(reader.pid, 0)
    times = 1024 * used.ru_maxrss / size
    print(options, "%.1f times its size" % times)
    if status or times > most:
        sys.exit(1)
END
check "a long log is read in little memory" 0 'times its size' python3 size.py "$tool"
# Ctrl-C while reading from a pipe: the writer ends, and what has come is shown. Only a thread that waits for signals shows that
# the command is reading; in a script's own children SIGINT would be ignored.
cat >pipe.py <<'END'
import signal, subprocess, sys
reader = subprocess.Popen([sys.argv[1], "decode"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
reader.stdin.write(open("log", "rb").read()[:4000])
reader.stdin.flush()
while reader.poll() is None and b"\nThreads:\t2" not in open("/proc/%d/status" % reader.pid, "rb").read():
    pass
reader.send_signal(signal.SIGINT)
reader.stdin.close()
text = reader.stdout.read()
sys.exit(reader.wait() != 0 or b"\nlines: " not in text)
END
check "Ctrl-C leaves it what has come through a pipe" 0 '' timeout "$(patient 20)" python3 pipe.py "$tool"
# Texts that come from others, in a picture and in a document.
cat >nasty <<END
2026-11-22T09:30:00.000001Z rpcrdma[5] info: fd 3: program 7 version 1 goes over rdma to h ($(printf '\xc2\x9b31m\xef\xbf\xbf\xd8\x9c')<x>&)
2026-11-22T09:30:00.000002Z rpcrdma[5] wire: fd 3 > RDMA_MSG xid 0x1 credits 1 reads [] writes [] reply none payload 40
2026-11-22T09:30:00.000003Z rpcrdma[5] wire: fd 3 < RDMA_MSG xid 0x1 credits 1 reads [] writes [] reply none payload 24
END
check "a picture is XML, whatever it says" 0 '^ *$' \
    sh -c "'$tool' decode --svg nasty.svg nasty && python3 -c 'import xml.dom.minidom; xml.dom.minidom.parse(\"nasty.svg\")'"
check "a document moves no cursor, whatever it says" 0 'u009b31m.uffff.u061c<x>&' "$tool" decode --json nasty
if LC_ALL=C grep -q $'\xc2\x9b' out; then FAIL "... and has no escape sequence" out; fi
check "no log" 1 'no call in it' "$tool" decode /etc/passwd
check "no file" 1 '/no/such/file: No such file' "$tool" decode /no/such/file
check "a full disk" 1 'standard output: No space left' sh -c "$tool decode log >/dev/full"
closing
