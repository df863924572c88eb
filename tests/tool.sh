#!/bin/bash
# tool.sh: the command `rpcrdma`: run, info, check and ping, against a file service that knows only libtirpc; and wrong settings
# are reported in the same words everywhere. As root, in a private network.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
why=$(bash "$here/ns.sh" --possible) || { skip "the command rpcrdma, with an rpcbind" "$why"; closing; }
if [ -z "${TOOL_INSIDE:-}" ]; then
    TOOL_INSIDE=1 exec bash "$here/ns.sh" bash "$0"
fi
cd "$scratch" || exit 1
unset RPCRDMA_LIB LD_PRELOAD RPCRDMA_PROVIDER
mkdir build && cp "$top/build/rpcrdma" "$top/build/rpcrdma-run" "$LIBRPCRDMA" build/
tool=$scratch/build/rpcrdma
cp "$top"/examples/fileservice/* "$top/examples/hello.c" .
for part in -h:fileservice.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M "${part%%:*}" -o "${part#*:}" fileservice.x || { FAIL "rpcgen"; closing; }
done
# shellcheck disable=SC2046
cc -O1 -I. $(pkg-config --cflags libtirpc) -o fileserver fileserver.c svc.c xdr.c $(pkg-config --libs libtirpc) 2>cc.log &&
    cc $(pkg-config --cflags libtirpc) -o hello hello.c $(pkg-config --libs libtirpc) 2>>cc.log || { FAIL "the programs compile" cc.log; closing; }
program=536888915    # of fileservice.x

# check NAME STATUS EXPECTED COMMAND...: the command's standard output and error must match an extended regular expression.
check() {
    local name=$1 status=$2 expected=$3 got; shift 3
    timeout "$(patient 30)" "$@" >out 2>&1; got=$?
    if [ $got -eq "$status" ] && grep -Eq -- "$expected" <<<"$(tr '\n' ' ' <out)"; then ok "$name"; else FAIL "$name (status $got)" out; fi
}
# json NAME STATUS EXPRESSION COMMAND...: the command's output must be one JSON document d, for which the expression holds.
json() {
    local name=$1 status=$2 expression=$3 got; shift 3
    timeout "$(patient 30)" "$@" >out 2>errors; got=$?
    if [ $got -eq "$status" ] && python3 -c 'import json, sys; d = json.load(open("out")); sys.exit(not eval(sys.argv[1]))' \
        "$expression" 2>>errors; then ok "$name"; else FAIL "$name (status $got)" errors; fi
}
mkdir served
# serve SETTING...: starts the file service with the library, on any port, which rpcbind knows.
registered() { rpcinfo 127.0.0.1 | awk -v program="$1" -v netid="$2" '$1 == program && $3 == netid { found = 1 } END { exit !found }'; }
serve() {
    log=$scratch/server.log
    start_ready env "$@" ./fileserver -n tcp -d served || { FAIL "a server" "$log"; closing; }
    wait_for 10 registered $program tcp || { FAIL "the server is registered" "$log"; closing; }
}
# unserve: ends the server, and removes its rows at rpcbind.
unserve() { stop "$server"; for netid in tcp tcp6 rdma rdma6; do rpcinfo -d -T $netid $program 1 2>/dev/null; rpcinfo -d $program 1 2>/dev/null; done; }

# Nothing to reach.
check "ping: nobody there" 1 "^rpcrdma ping: no program is registered on netid rdma at 127.0.0.1, and none on tcp" "$tool" ping 127.0.0.1
check "ping: a program that is not there" 1 "RPC: Program not registered; program 7 is not registered on netid rdma" "$tool" ping 127.0.0.1 7
check "ping: a name that is no program's" 1 '"nosuch": no such program in /etc/rpc, and no number' "$tool" ping 127.0.0.1 nosuch
check "ping: a port without a program" 2 'required' "$tool" ping 127.0.0.1 -p 9
check "ping: no calls" 2 'invalid value' "$tool" ping 127.0.0.1 -c 0
check "ping: nobody at the port" 1 "cannot connect to 127.0.0.1:9: Connection refused" "$tool" ping 127.0.0.1 7 1 -p 9
json "ping --json: nobody at the port" 1 'd["answered"] == 0 and "refused" in d["errors"][0]' "$tool" ping 127.0.0.1 7 1 -p 9 --json
check "info: no problem" 0 'problems +none $' "$tool" info 127.0.0.1
check "info: a host that there is not" 1 'problem +no.such.host.invalid: ' "$tool" info no.such.host.invalid
check "info: LD_PRELOAD of what is not there" 1 'LD_PRELOAD names /none/librpcrdma.so.0, which the loader does not find' \
    env LD_PRELOAD=/none/librpcrdma.so.0 "$tool" info

# A server that knows only tcp.
serve
check "ping: tcp only" 1 "no program is registered on netid rdma at 127.0.0.1, but on tcp: .*RPCRDMA_REDIRECT=tcp" "$tool" ping 127.0.0.1
check "ping over tcp" 0 "on tcp .*answer from 127.0.0.1:[0-9]+: seq=2 time=" "$tool" ping 127.0.0.1 --netid tcp -c 2 -i 0.01
check "ping over tcp is tcp, whatever is moved" 0 "answer from" \
    env RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no "$tool" ping 127.0.0.1 --netid tcp -c 1
json "info --json: tcp only" 0 "[r['netid'] for r in d['rpcbind']['registered'] if r['program'] == $program] == ['tcp']" \
    "$tool" info 127.0.0.1 --json
unserve

# A moved server.
serve LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp
wait_for 10 registered $program rdma || FAIL "the server is registered on rdma" "$log"
check "ping: shared memory" 0 "shared memory \(local\), RPC-over-RDMA version 1, inline 262144 bytes out and 262144 in, credits 32 granted of 32 asked .*answers over tcp too .*seq=3 .*3 calls sent, 3 answered, 0 lost \(0%\).* rtt min/avg/max/mdev = [0-9./]+ ms, p50 " \
    "$tool" ping 127.0.0.1 -c 3 -i 0.01
check "ping: software iWARP, and other settings" 0 "software iWARP.*\(iwarp\).*inline 8192 bytes out.*credits 5 granted of 5 asked|credits [0-9]+ granted of 5 asked" \
    env RPCRDMA_PROVIDER=iwarp RPCRDMA_CREDITS=5 RPCRDMA_INLINE=8192 "$tool" ping localhost $program 1 -c 1
check "ping: IPv6" 0 "on rdma6 .*answer from \[::1\]:" "$tool" ping ::1 -c 1
check "ping: a version that there is not" 1 "RPC: Program/version mismatch; low version = 1, high version = 1.*1 lost \(100%\)" \
    "$tool" ping 127.0.0.1 $program 7 -c 1
served_at=$(rpcinfo -p 127.0.0.1 | awk -v program=$program '$1 == program && $3 == "tcp" { print $4; exit }')
check "ping: a port, and the version is found" 0 "version 1 on rdma .*answer from 127.0.0.1:$served_at" "$tool" ping 127.0.0.1 $program -p "$served_at" -c 1
json "ping --json" 0 "d['sent'] == d['answered'] == 2 and d['connection']['device'] == 'local' and d['tcp']['answers'] and d['round_trip']['min'] <= d['round_trip']['p50'] <= d['round_trip']['max']" \
    "$tool" ping 127.0.0.1 --json -c 2 -i 0.01
json "info --json: what is registered" 0 "sorted(r['netid'] for r in d['rpcbind']['registered'] if r['program'] == $program) == ['rdma', 'rdma6', 'tcp'] and d['towards']['used'] == 'local'" \
    "$tool" info 127.0.0.1 --json
json "info --json: another device" 0 "d['towards']['used'] == 'iwarp' and 'RPCRDMA_PROVIDER=iwarp takes nothing else' in str(d['towards']['tried']) and {'key': 'provider', 'value': 'iwarp', 'source': 'environment'} in d['settings']" \
    env RPCRDMA_PROVIDER=iwarp "$tool" info 127.0.0.1 --json

# A peer that accepts the connection and says nothing: ping waits no longer than the user wishes.
moved_server=$server
start_silent || FAIL "a silent peer"
for netid in rdma tcp; do
    began=${EPOCHREALTIME/./}
    check "ping: a peer that is silent ($netid)" 1 "within 0.3 s|Timed out" "$tool" ping 127.0.0.1 7 1 -p "$port" --netid $netid -W 0.3 -c 1
    took=$((${EPOCHREALTIME/./} - began))
    if [ $took -lt $(($(patient 3) * 1000000)) ]; then ok "... is not waited for"; else FAIL "... is not waited for: $took us"; fi
done
stop "$server"; server=$moved_server

# Ctrl-C: the summary, at once, though the next call would be in a minute.
"$tool" ping 127.0.0.1 -i 60 >ping.log 2>&1 & pinging=$!; children+=("$pinging")
wait_for 10 grep -q 'seq=1' ping.log || FAIL "ping answers" ping.log
began=${EPOCHREALTIME/./}
kill -INT $pinging; wait $pinging; got=$?
if [ $got -eq 0 ] && grep -q '^1 calls sent, 1 answered, 0 lost' ping.log && [ $((${EPOCHREALTIME/./} - began)) -lt $(($(patient 5) * 1000000)) ]; then
    ok "ping: Ctrl-C ends it with a summary"
else
    FAIL "ping: Ctrl-C ends it with a summary (status $got)" ping.log
fi
# The reader of the output goes away.
"$tool" ping 127.0.0.1 -i 0.01 2>ping.log | head -n 1 >/dev/null
if [ -s ping.log ]; then FAIL "ping: a reader that goes" ping.log; else ok "ping: a reader that goes ends it in silence"; fi
# The reader neither reads nor goes away: a second signal ends ping.
mkfifo unread
"$tool" ping 127.0.0.1 -i 0.001 >unread 2>/dev/null & pinging=$!; children+=("$pinging")
exec {unread}<unread
wait_for 30 grep -q '^1 0x1 ' "/proc/$pinging/syscall"
kill -TERM $pinging; wait_for 10 grep -q '^ShdPnd:.0*$' "/proc/$pinging/status"; kill -TERM $pinging
ended() { ! kill -0 $pinging 2>/dev/null || grep -q '^State:.Z' /proc/$pinging/status; }
if wait_for 5 ended; then ok "ping: a second signal ends it though nobody reads"; else FAIL "ping: a second signal ends it though nobody reads"; fi
exec {unread}<&-
check "run: the program's status, and what is moved" 42 "^$scratch/build/librpcrdma.so.0 tcp \$" "$tool" run --move tcp -- sh -c 'echo $LD_PRELOAD $RPCRDMA_REDIRECT; exit 42'
check "run: options of the program" 0 '^-n x \$?$|^-n x $' "$tool" run printf '%s ' -n x
check "run: a program that is not there" 127 '^rpcrdma-run: no-such-program: No such file' "$tool" run no-such-program
check "run: no program" 2 'required' "$tool" run
mkdir alone && cp build/rpcrdma alone
check "run: rpcrdma-run is missing" 125 '^rpcrdma run: rpcrdma-run is neither in .*/alone nor in the PATH' env PATH=/nowhere alone/rpcrdma run true
check "info: rpcrdma-run is missing" 1 'problem +rpcrdma-run is neither in' env PATH=/nowhere alone/rpcrdma info

# A wrong configuration, in the same words everywhere.
printf '%d 1 1 max-reply=1K\n  %d 1 2 arguments=int,itn\n' $program $program >bindings
words='bindings:2:31: "itn": must be int, unsigned, bool, enum, hyper, opaque, string, opaque\[BYTES\], count, data, data<SIZE> or \.\.\., with commas between'
check "check: a file of bindings" 1 "^$words \$" "$tool" check bindings
check "check: without a file" 1 "^$words \$" env RPCRDMA_BINDINGS=bindings "$tool" check
check "info says it" 1 "problem +$words" env RPCRDMA_BINDINGS=bindings "$tool" info
check "rpcrdma-run says it" 125 "^rpcrdma-run: $words \$" env RPCRDMA_BINDINGS=bindings build/rpcrdma-run true
check "rpcrdma run says it" 125 "^rpcrdma-run: $words \$" env RPCRDMA_BINDINGS=bindings "$tool" run true
check "ping says it" 1 "$words" env RPCRDMA_BINDINGS=bindings "$tool" ping 127.0.0.1
check "clnt_pcreateerror says it" 1 "$words" env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_BINDINGS=bindings ./hello 127.0.0.1 $program 1
printf '# mine\ncredits = 5 # few\n crc = on\ncredit = 3\n' >settings
check "check: a file of settings" 1 '^settings:3:8: crc = "on": must be auto, yes or no settings:4:1: "credit": no such setting; did you mean credits\? $' \
    "$tool" check settings
check "check: what cannot be read" 1 '^none: No such file or directory /: must be a regular file, and is a directory $' "$tool" check none /
echo nonsense >$'bad\e[31m'
check "check: the names of files move no cursor" 1 '^bad\?\[31m:1:1: "nonsense"' "$tool" check $'bad\e[31m'
printf 'credits = 5\n' >settings
check "check: what is right" 0 '^settings: all is understood \(settings\) $' "$tool" check settings
check "check --quiet" 0 '^ ?$' "$tool" check --quiet settings
check "RPCRDMA_LIB is no setting" 0 '^all is understood' env RPCRDMA_LIB="$LIBRPCRDMA" "$tool" check
# /etc is this machine's own: a copy of it takes its place here.
mkdir etc && cp -a /etc/. etc/ 2>/dev/null
printf 'poll = 7\ncredits = 5\n' >etc/rpcrdma.conf
mount --bind etc /etc 2>/dev/null
if grep -q 'poll = 7' /etc/rpcrdma.conf 2>/dev/null; then
    json "info: each setting and who has set it" 0 "[s for s in d['settings'] if s['source'] != 'default'] == [{'key': 'credits', 'value': '9', 'source': 'environment'}, {'key': 'poll', 'value': '7', 'source': '/etc/rpcrdma.conf:1'}]" \
        env RPCRDMA_CREDITS=9 "$tool" info --json
    # This machine's own settings have no effect in tests, whoever runs them.
    echo 'nonsense = 1' >/etc/rpcrdma.conf
    mkdir -p /etc/rpcrdma.d && echo nonsense >/etc/rpcrdma.d/x.conf
    check "settings of this machine" 1 'rpcrdma.conf:1:1: "nonsense"' "$tool" check
    check "... are covered for tests" 0 '^all is understood: /etc/rpcrdma.conf, .*bindings: 0 ' env TEST_DEFAULTS= bash "$here/defaults.sh" "$tool" check
    check "... of an ordinary user, or it is said" 0 '^ ?$|^defaults.sh: .* count in what follows.* nonsense' \
        env TEST_DEFAULTS= setpriv --reuid 65534 --regid 65534 --clear-groups bash -c "$(cat "$here/defaults.sh")" - cat /etc/rpcrdma.conf
    umount -l /etc
else
    skip "info: each setting and who has set it" "/etc cannot be replaced"
fi
stop "$server"

# No rpcbind: another network.
check "ping: no rpcbind" 1 '^rpcrdma ping: no rpcbind at 127.0.0.1:111: Connection refused; is it running\?' \
    unshare --net sh -c "ip link set lo up; exec '$tool' ping 127.0.0.1"
# An rpcbind whose list never ends: to take all of it would take all memory.
cat >endless.py <<'END'
import socket, struct, threading
text = lambda word: struct.pack(">I", len(word)) + word + bytes(-len(word) % 4)
rows = (struct.pack(">3I", 1, 7, 1) + text(b"tcp") + text(b"0.0.0.0.8.1") + text(b"x" * 8000)) * 100
def serve(peer):
    call = peer.recv(4096)
    piece = call[4:8] + struct.pack(">5I", 1, 0, 0, 0, 0) + rows
    try:
        while True:
            peer.sendall(struct.pack(">I", len(piece)) + piece)
            piece = rows
    except OSError:
        pass
listener = socket.create_server(("127.0.0.1", 111))
print("READY", flush=True)
while True:
    threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
END
# COMMAND...: runs it beside such an rpcbind, with 2 GiB of address space.
cat >endless <<'END'
#!/bin/bash
ip link set lo up
exec {ready}< <(exec python3 endless.py)
listing=$!
read -r _ <&"$ready"
(ulimit -v 2097152; exec "$@")
status=$?
kill $listing
exit $status
END
check "ping: an rpcbind whose list has no end" 1 '^rpcrdma ping: rpcbind at 127.0.0.1:111 does not come to the end of its list' unshare --net bash endless "$tool" ping 127.0.0.1
check "a CLIENT: an rpcbind whose list has no end" 1 'does not come to the end of its list' unshare --net bash endless env LD_PRELOAD="$LIBRPCRDMA" ./hello 127.0.0.1 $program 1
for words in --help --version 'help ping' 'perf --help' check info 'info --json' stat 'stat --json' 'stat --all --prometheus' \
    "ping 127.0.0.1 7 1 -p 9 --json"; do
    check "$words: a full disk" 1 '^rpcrdma[a-z ]*: standard output: No space left' sh -c "'$tool' $words >/dev/full"
    check "$words: nowhere to write to" 1 '^rpcrdma[a-z ]*: standard output: Bad file descriptor' sh -c "'$tool' $words >&-"
done
for words in 'stat 4194304' 'decode /none' 'ping no.such.host.invalid' 'perf --draw /none' top; do
    check "$words: nowhere to complain to" 1 '^ ?$' sh -c "'$tool' $words 2>/dev/full"
done
check "run: nowhere to complain to" 127 '^ ?$' sh -c "'$tool' run no-such-program 2>/dev/full"
check "wrong arguments, and nowhere to write to" 2 'unexpected argument' sh -c "'$tool' check --none >&-"
check "info HOST: no rpcbind is a problem" 1 'problem +no rpcbind at 127.0.0.1:111' unshare --net sh -c "ip link set lo up; exec '$tool' info 127.0.0.1"
check "info: no rpcbind is none here" 0 'problems +none' unshare --net sh -c "ip link set lo up; exec '$tool' info"

# What is generated.
check "generate" 0 '^ ?$' "$tool" generate generated
[ ! -e generated/man1/rpcrdma-run.1 ] && [ -s generated/man1/rpcrdma-ping.1 ] && ok "pages, but for that of rpcrdma-run" || FAIL "pages"
if type -P mandoc >/dev/null; then
    check "the pages are right" 0 '^ ?$' mandoc -Tlint -W warning generated/man1/*.1
else
    skip "the pages are right" "no mandoc"
fi
# Every page as a reader sees it. A system without manual pages has a `man` that only says so.
if ! type -P man >/dev/null || ! man -l "$top/docs/rpcrdma.7" 2>/dev/null | grep -q '^NAME'; then
    skip "man shows every page" "no man"
else
    : >wrong
    for page in generated/man1/*.1 "$top"/docs/*.[1-8]; do
        LC_ALL=C.UTF-8 MANWIDTH=80 man --warnings -l "$page" >shown 2>said
        status=$?
        if [ $status -ne 0 ] || [ -s said ] || ! grep -q '^NAME' shown; then { echo "$page: status $status"; cat said; } >>wrong; fi
    done
    if [ -s wrong ]; then FAIL "man shows every page" wrong; else ok "man shows every page"; fi
fi
check "completions offer nothing that is hidden" 1 '^ ?$' grep -E -e '--child|Writes manual pages|generate' -r generated/completions
# completes SHELL START EXPECTED...: in a terminal, what Tab makes of "rpcrdma ...".
screen() { mux capture-pane -p >screen; grep -Eq -- "$1" screen; }
# A tmux server for each shell: one that is ending takes new sessions with it.
mux() { tmux -L "rpcrdma-tool$$-${shell%% *}" -f /dev/null "$@"; }
completes() {
    local shell=$1 begin=$2 typed expected; shift 2
    PATH=$scratch/build:$PATH TERM=xterm mux new-session -d -x 100 -y 30 "$shell"
    mux send-keys -l "$begin; PS1='ready '; clear"; mux send-keys Enter
    wait_for 10 screen '^ready *$' || FAIL "$shell is ready" screen
    while [ $# -gt 0 ]; do
        typed=$1 expected=$2; shift 2
        mux send-keys -l "$typed"; wait_for 10 screen "^ready $typed *\$"
        mux send-keys Tab
        # A second Tab lists what there is if the first has only completed.
        if wait_for 10 screen "$expected" || { mux send-keys Tab; wait_for 10 screen "$expected"; }; then
            ok "${shell%% *} completes $typed"
        else
            FAIL "${shell%% *} completes $typed" screen
        fi
        mux send-keys C-c; mux send-keys -l clear; mux send-keys Enter
        wait_for 10 screen '^ready *$'; mux clear-history
    done
    mux kill-server
}
if ! type -P tmux >/dev/null; then
    skip "completions in a terminal" "tmux is not installed"
else
    completes 'bash --norc --noprofile' '. generated/completions/rpcrdma.bash' \
        'rpcrdma pi' '^ready rpcrdma ping' 'rpcrdma ping --net' '^ready rpcrdma ping --netid' 'rpcrdma decode sett' '^ready rpcrdma decode settings'
    if type -P zsh >/dev/null; then
        completes 'zsh -f' 'fpath=($PWD/generated/completions $fpath); autoload -Uz compinit; compinit -u -D' \
            'rpcrdma pi' '^ready rpcrdma ping' 'rpcrdma ping --net' '^ready rpcrdma ping --netid' 'rpcrdma perf --device lo' '^ready rpcrdma perf --device local' \
            'rpcrdma decode sett' '^ready rpcrdma decode settings' 'rpcrdma run setpri' '^ready rpcrdma run setpriv'
    else
        skip "zsh completes" "no zsh"
    fi
fi
closing
