#!/bin/bash
# stat.sh: `rpcrdma stat` and `rpcrdma top` on running processes: their figures against those that the processes themselves
# have (c-tests/watched.c); processes of the same user and of others, that fork, have closed their descriptors, may not be
# watched, or have ended; the screen in tmux.
#
# RPCRDMA names the command (default: build/rpcrdma).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
rpcrdma=$(realpath "${RPCRDMA:-$top/build/rpcrdma}")
[ -x "$rpcrdma" ] || { FAIL "$rpcrdma is there: run make first"; closing; }
cd "$scratch" || exit 1
unset RPCRDMA_STATS
# What other users run must be readable for them.
chmod 755 .
cp "$LIBRPCRDMA" librpcrdma.so.0 && cp "$rpcrdma" command && chmod 755 librpcrdma.so.0 command
stat() { ./command stat "$@"; }
compile() { cc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread "$@" $(pkg-config --cflags --libs libtirpc) 2>cc.log; }
compile -o watched "$top/c-tests/watched.c" && compile -o bench "$top/bench/bench.c" || { FAIL "it compiles" cc.log; closing; }
with_library=(env LD_PRELOAD="$scratch/librpcrdma.so.0")

start_ready "${with_library[@]}" ./bench server rdma || { FAIL "the server starts"; closing; }

# start COMMAND...: starts a watched client. Sets pid; `tell LINE` sends it a line and sets answer.
start() {
    rm -f to from; mkfifo to from; chmod 666 to from
    exec "$@" ./watched "$port" <to >from 2>err & pid=$!
    children+=("$pid")
    exec {to}>to {from}<from
}
tell() { answer=; echo "$*" >&"$to"; read -r -t "$(patient 10)" -u "$from" answer; }

# same NAME EXPECTED FOUND
same() { if [ "$2" = "$3" ]; then ok "$1"; else echo "expected: $2, found: $3" >why; FAIL "$1" why; fi; }
# refused NAME TEXT ARGUMENT...: nothing on stdout, TEXT on stderr, and status 1.
refused() {
    local name=$1 text=$2 status; shift 2
    stat "$@" >out 2>err; status=$?
    if [ $status -eq 1 ] && [ ! -s out ] && grep -qF -- "$text" err; then ok "$name"; else cat out >>err; FAIL "$name (status $status)" err; fi
}
counter() { awk -v name="$1" '$1 == name && NF == 2 { print $2; exit }'; }

# ------------------------------------------------------------------------------------------------------------- figures

start "${with_library[@]}"
tell calls 0
tell counters
tell calls 500
tell counters
read -r -a own <<<"$answer"
stat "$pid" >out 2>err
names=(calls replies served bytes_inline bytes_read bytes_written bytes_copied bytes_read_ahead registrations invalidations
    sends receives syscalls connections credits_waited)
found=
for name in "${names[@]}"; do found+="$(counter "$name" <out) "; done
same "counters are those of the process" "${own[*]} " "$found"
same "so is the number of calls in the histogram" 500 "$(awk '$1 == "0x20004245" { print $5 }' out)"
same "the procedure has its name" NULL "$(awk '$1 == "0x20004245" { print $3 }' out)"
same "the connection leads to the server" "127.0.0.1:$port client 1" \
    "$(awk -v to="127.0.0.1:$port" '$1 == to { print $1, $2, $3 }' out)"
same "no credit is in use" 0/32 "$(awk -v to="127.0.0.1:$port" '$1 == to { print $4 }' out)"
same "bytes of the connection are those of the process" "${own[3]}" \
    "$(stat --json "$pid" | grep -o '"bytes_inline": [0-9]*' | head -n 1 | cut -d' ' -f2)"
[ ! -s err ] && ok "and nothing on stderr" || FAIL "nothing on stderr" err
same "the server has served as many" 500 "$(stat "$server" | counter served)"
# Within 100 nanoseconds and a minute: half of the calls, then nearly all.
stat "$pid" | awk '$1 == "0x20004245" { print $6, $7, $8 }' | sed 's/us/ 1/g; s/ms/ 1000/g; s/\([0-9]\)s/\1 1000000/g' >times
awk '{ exit !($1 * $2 > 0.1 && $1 * $2 <= $3 * $4 && $3 * $4 <= $5 * $6 && $5 * $6 < 6e7) }' times &&
    ok "percentiles are in their order" || FAIL "percentiles are in their order" times

stat --json "$pid" >json
if command -v python3 >/dev/null; then
    same "--json is JSON with the same figures" "500 $pid 500" \
        "$(python3 -c 'import json,sys; d = json.load(sys.stdin); print(d["counters"]["calls"], d["pid"], d["latencies"][0]["calls"])' <json)"
else
    skip "--json is JSON" "no python3"
fi
stat --prometheus "$pid" >metrics
same "--prometheus has the same figures" 500 "$(sed -n 's/^rpcrdma_calls_total{.*} //p' metrics)"
same "its histogram ends with all calls" "500 500" \
    "$(sed -n 's/^rpcrdma_call_seconds_bucket{.*le="+Inf"} //p; s/^rpcrdma_call_seconds_count{.*} //p' metrics | xargs)"
if ! command -v python3 >/dev/null; then
    skip "a collector takes them" "no python3"
elif python3 "$here/metrics.py" <metrics >why 2>&1; then
    ok "a collector takes them"
else
    FAIL "a collector takes them" why
fi
stat "$pid" 0.05 3 >lines 2>err
same "lines repeat, with a title" 4 "$(wc -l <lines)"
same "and of all processes" 3 "$(stat --all 0.05 1 | grep -Ec "PID|^ *($pid|$server) ")"
same "without arguments processes are listed" 2 "$(stat | grep -Ec "^ *($pid|$server) ")"

# ------------------------------------------------------------------------------------------------------------ refusals

refused "what is no process" "there is no process 4194304" 4194304
refused "a process without the library" "does not use the library" $$
for wrong in x 0 -1 "$pid 0" "$pid 1 0" "--all 1 2 3" "--json --prometheus" "--prometheus $pid 1"; do
    # shellcheck disable=SC2086
    stat $wrong >out 2>&1
    [ $? -eq 2 ] || echo "$wrong" >>wrong
done
[ ! -s wrong ] && ok "wrong arguments have status 2" || FAIL "wrong arguments have status 2" wrong
stat "$pid" 0.05 | head -n 1 >/dev/null
same "a reader that goes ends it quietly" "141 0" "${PIPESTATUS[*]}"

first=$pid first_to=$to first_from=$from
start "${with_library[@]}" RPCRDMA_STATS=no
tell calls 5
refused "a process that is not to be watched" "RPCRDMA_STATS=no" "$pid"
same "and it has no such descriptor" 0 "$(ls -l "/proc/$pid/fd" | grep -c rpcrdma-stats)"
tell counters
same "its own counters go on" 5 "${answer%% *}"
tell end
start "${with_library[@]}"
tell counters
refused "a process without a connection" "has made no connection over rdma yet" "$pid"
tell calls 3
stat "$pid" 0.05 >lines 2>err & watcher=$!
children+=("$watcher")
wait_for 5 grep -q calls/s lines
kill -KILL "$pid"; wait "$pid" 2>/dev/null
wait "$watcher"
same "of a process that is killed it says so and ends" "1 rpcrdma stat: process $pid has ended" "$? $(cat err)"

# ------------------------------------------------------------------------------------------- pages that somebody has made up

# harmless: nothing that was written can control a terminal.
harmless() {
    python3 -c 'import sys, unicodedata
text = "".join(open(name, encoding="utf-8").read() for name in sys.argv[1:])
sys.exit(any(c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cn") for c in text))' out err
}
if ! command -v python3 >/dev/null; then
    skip "pages that somebody has made up" "no python3"
else
    honest=$server at=$port
    for kind in escapes long numbers random many newer damaged cut shrinks; do
        start_ready python3 "$here/page.py" $kind || FAIL "a page: $kind"
        made=$server
        case $kind in newer | damaged | cut | shrinks) expected=1 ;; *) expected=0 ;; esac
        : >why
        for how in "$made" "--json $made" "--prometheus $made" "$made 0.01 1" "" --json "--all 0.01 1"; do
            # shellcheck disable=SC2086
            timeout "$(patient 30)" ./command stat $how >out 2>err; status=$?
            case $how in
            *"$made"*) [ $status -eq $expected ] ;;
            *) [ $status -eq 0 ] ;;
            esac || echo "stat $how: status $status" >>why
            harmless || echo "stat $how: letters that a terminal obeys" >>why
            [ -s out ] || continue
            case $how in
            *json*) python3 -c 'import json; json.load(open("out"))' 2>>why || echo "stat $how: no JSON" >>why ;;
            *prometheus*) python3 "$here/metrics.py" <out >/dev/null 2>>why || echo "stat $how: no metrics" >>why ;;
            esac
        done
        if [ -s why ]; then FAIL "a page: $kind" why; else ok "a page: $kind"; fi
        stat >out 2>err
        case $kind in
        long) expected="^ *$made [a-z+]+ +W{15}\\+ +1 +0 +0  [0-9]+[smhd]\$" ;;
        newer) expected="^process $made: its library, version 0.1.0, shows its figures in another way" ;;
        damaged) expected="^process $made: its figures are damaged" ;;
        *) expected= ;;
        esac
        if [ -n "$expected" ]; then
            if grep -Eq "$expected" out; then ok "... in the list"; else FAIL "... in the list" out; fi
        fi
        stop "$made"
    done
    server=$honest port=$at
fi

# ---------------------------------------------------------------------------------------------------- forks, descriptors

pid=$first to=$first_to from=$first_from
tell fork 7
child=$answer
same "a child begins with its parent's figures" 507 "$(stat "$child" | counter calls)"
same "its histogram and connection are its own" 1 "$(stat "$child" | grep -c "127.0.0.1:$port *client")"
same "its parent's figures are its parent's" 500 "$(stat "$pid" | counter calls)"
tell end
tell close
same "with all descriptors closed the figures are there" 500 "$(stat "$pid" 2>&1 | counter calls)"
tell calls 11
same "and go on" 511 "$(stat "$pid" 2>&1 | counter calls)"
tell counters
same "as the process says" 511 "${answer%% *}"

start "${with_library[@]}" prlimit --nofile=20
tell calls 2
same "with few descriptors too" 2 "$(stat "$pid" 2>&1 | counter calls)"
tell end

# ---------------------------------------------------------------------------------------------------------- other users

pid=$first to=$first_to from=$first_from
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
if [ "$(id -u)" -ne 0 ]; then
    skip "processes of others" "needs root"
else
    "${nobody[@]}" ./command stat "$pid" >out 2>err
    same "a process of root is not shown to others" "1 rpcrdma stat: process $pid belongs to root: run as root" "$? $(cat out err)"
    "${nobody[@]}" ./command stat >out 2>err
    grep -q 'could not be looked at: run as root' out && ok "and the list says that there are some" || FAIL "the list says so" out
    # That there is nothing to show is reported, but not on standard output, which a program may read.
    for what in "--all" "--all 0.01 2"; do
        # shellcheck disable=SC2086
        "${nobody[@]}" ./command stat $what >out 2>err; status=$?
        if [ $status -eq 0 ] && [ ! -s out ] && grep -q '^No process that may be looked at uses the library\.$' err &&
            grep -q 'could not be looked at: run as root$' err && [ "$(wc -l <err)" -eq 2 ]; then
            ok "stat $what with no process to show says why"
        else
            cat out >>err; FAIL "stat $what with no process to show says why (status $status)" err
        fi
    done
    start "${nobody[@]}" "${with_library[@]}"
    tell calls 4
    same "its owner sees it" 4 "$("${nobody[@]}" ./command stat "$pid" 2>&1 | counter calls)"
    if ls "/proc/$pid/fd" >/dev/null 2>&1; then
        same "and so does root" 4 "$(stat "$pid" 2>&1 | counter calls)"
    else
        skip "and so does root" "this root lacks CAP_SYS_PTRACE"
    fi
    tell end
fi

# --------------------------------------------------------------------------------------------------------------- screen

./command top >out 2>err </dev/null
same "without a terminal top says so" "1 yes" "$? $(grep -q 'needs a terminal' err && echo yes)"
# A terminal goes away: no process must stay behind that asks it for keys for ever.
cat >gone.py <<'END'
import fcntl, os, pty, signal, struct, sys, termios, time
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    if sys.argv[1] == "ignored":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TERM"] = "xterm"
    os.execv("./command", ["rpcrdma", "top", "-d", "0.2"])
seen = b""
while b"CALLS" not in seen:
    seen += os.read(terminal, 4096)
os.close(terminal)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        sys.exit("it ended by signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    time.sleep(0.02)
os.kill(pid, signal.SIGKILL)
sys.exit("it goes on")
END
for manner in told ignored; do
    if ! command -v python3 >/dev/null; then
        skip "top ends with its terminal" "no python3"
    elif python3 gone.py $manner "$(patient 10)" >why 2>&1; then
        ok "top ends with its terminal (SIGHUP: $manner)"
    else
        FAIL "top ends with its terminal (SIGHUP: $manner)" why
    fi
done
if command -v tmux >/dev/null; then
    pid=$first to=$first_to from=$first_from
    export TERM=xterm
    mux() { tmux -L "rpcrdma$$" -f /dev/null "$@"; }
    screen() { mux capture-pane -p >screen; grep -Eq -- "$1" screen; }
    mux new-session -d -x 130 -y 30 'bash --norc --noprofile'
    type_in() { mux send-keys -l "$1"; mux send-keys Enter; }
    type_in 'stty -a >before; ./command top -d 0.2; echo "status $?"; stty -a >after'
    wait_for 10 screen "^ *$server .* bench" && ok "top shows processes" || FAIL "top shows processes" screen
    # Calls per second appear at the second look, while calls are made.
    calling() { tell calls 200; screen "^ *$pid .* watched +[1-9][0-9]* "; }
    wait_for 30 calling && ok "and their calls a second" || FAIL "and their calls a second" screen
    mux send-keys s; wait_for 5 screen 'by connections' && ok "s sorts" || FAIL "s sorts" screen
    mux send-keys s s s; wait_for 5 screen 'by pid'
    # Other processes may be listed above it.
    for _ in $(seq 50); do
        mux send-keys Enter; wait_for 5 screen 'Esc back'
        screen "process $pid of " && break
        mux send-keys Escape; wait_for 5 screen 's sort'; mux send-keys Down
    done
    wait_for 5 screen '^PEER .*CREDITS' && screen '^0x20004245 1 +NULL' && ok "Enter shows connections and procedures" ||
        FAIL "Enter shows connections and procedures" screen
    # Most terminals have 80 columns.
    mux resize-window -x 80 -y 30
    wait_for 10 screen '^PEER .* CALLS .* DEVICE$' && screen ' software iWARP(, CRC off)?$' && ok "of 80 columns those that there are are whole" ||
        FAIL "of 80 columns those that there are are whole" screen
    mux resize-window -x 130 -y 30
    wait_for 10 screen '^PEER .* PLACED WAITED .* DEVICE$'
    mux send-keys Escape; wait_for 5 screen 'PROGRAM +CALLS/S' && ok "Esc goes back" || FAIL "Esc goes back" screen
    mux send-keys q; wait_for 5 screen '^status 0' && ok "q ends it" || FAIL "q ends it" screen
    wait_for 5 cmp -s before after && ok "and the terminal is as it was" || { diff before after >why; FAIL "the terminal is as it was" why; }
    mux send-keys -R; mux clear-history
    type_in 'clear; ./command top -d 0.2; echo "status $?"; stty -a >after2'
    wait_for 10 screen 'rpcrdma top:'
    mux send-keys C-c; wait_for 5 screen '^status 0' && wait_for 5 cmp -s before after2 && ok "so does Ctrl-C" || FAIL "so does Ctrl-C" screen
    type_in 'clear; ./command top -d 0.2; echo "status $?"; stty -a >after3'
    wait_for 10 screen 'rpcrdma top:'
    killed=$(pgrep -P "$(mux display-message -p '#{pane_pid}')" -x command)
    [ -n "$killed" ] && kill -TERM "$killed"
    wait_for 5 screen '^status 0' && wait_for 5 cmp -s before after3 && ok "and SIGTERM" || FAIL "and SIGTERM" screen
    mux send-keys -R; mux clear-history
    type_in 'clear; ./command top -d 0.2; echo "status $?"; stty -a >after4'
    wait_for 10 screen 'rpcrdma top:'
    mux send-keys C-z; wait_for 10 screen 'Stopped' && wait_for 10 cmp -s before after4 && ok "Ctrl-Z leaves the terminal to the shell" ||
        FAIL "Ctrl-Z leaves the terminal to the shell" screen
    type_in 'clear; fg >/dev/null; echo "status $?"'
    wait_for 10 screen "^ *$server .* bench" && mux send-keys q && wait_for 10 screen '^status 0' && ok "... and goes on" || FAIL "... and goes on" screen
    # A narrow screen shows fewer columns, and whole numbers.
    mux resize-window -x 48 -y 30
    mux clear-history; type_in 'clear; ./command top -d 0.2; echo "status $?"'
    wait_for 10 screen "^ *$server bench +" && screen '^     PID PROGRAM +CALLS/S  SERVED/S' && ok "a narrow screen has whole columns" ||
        FAIL "a narrow screen has whole columns" screen
    mux send-keys q; wait_for 5 screen '^status 0'
    type_in 'clear; TERM=dumb ./command top; echo "status $?"'
    wait_for 20 screen '^status 1' && screen 'this terminal has no screen' && ok "a terminal without a screen is named" ||
        FAIL "a terminal without a screen is named" screen
    mux kill-server
else
    skip "top in a terminal" "tmux is not installed"
fi
closing
