#!/bin/bash
# preload.sh: what the library costs programs that make no RPC but have it preloaded all the same, in a session with LD_PRELOAD:
# they load nothing else, make no system calls but those that map it, and touch few of its pages. And libtirpc is found when it
# is loaded later, or is missing.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
export HOME=$scratch PYTHONDONTWRITEBYTECODE=1 GIT_CONFIG_NOSYSTEM=1

# What the library may cost a bystander (docs/moving.md): system calls. And in KiB: its private copies of pages that it has
# written to; other memory written to because of it (thread-local variables, the loader's records); and all its mapped pages,
# which other processes share. The kernel maps 64 KiB around each page that is touched, and which pages those are depends on
# the compiler (296 KiB with Rust 1.95 of rustup, 412 with the 1.96 of Debian).
CALLS=12 OWN=48 BESIDE=16 MAPPED=512

# The same addresses in each run, where that is allowed, since pages are counted.
steady=()
setarch -R true 2>/dev/null && steady=(setarch -R)
# An environment of the same length.
without=("LD_PRELOAX=$LIBRPCRDMA") with=("LD_PRELOAD=$LIBRPCRDMA")

# ------------------------------------------------------------------------------------------------------ system calls

# traced FILE VARIABLE COMMAND...: writes the command's system calls to FILE, one per line.
traced() {
    local file=$1 variable=$2; shift 2
    "${steady[@]}" strace -E "$variable" -o "$file" "$@" >/dev/null 2>"$file.err" </dev/null && [ -s "$file" ]
}
calls() { sed -n 's/^\([a-z0-9_]*\)(.*/\1/p' "$1" | sort | uniq -c; }
opened() { sed -n 's/^open[a-z0-9]*(.*"\(.*\)".*= [0-9].*/\1/p' "$1" | sort; }
# The system calls from the opening of the library to its closing.
its_own() {
    awk -v library="$LIBRPCRDMA" '
        index($0, "\"" library "\"") && / = [0-9]+$/ { inside = 1; print; next }
        inside { print }
        inside && /^close/ { inside = 0 }' "$1"
}

# same_calls NAME COMMAND...
same_calls() {
    local name=$1 run; shift
    # Runs it once beforehand, for what the first run leaves behind.
    "$@" >/dev/null 2>&1 </dev/null
    if ! traced plain "${without[0]}" "$@" || ! traced preloaded "${with[0]}" "$@"; then
        cat plain.err preloaded.err >err 2>/dev/null
        skip "$name: system calls" "it cannot be traced here: $(tail -n 1 err)"
        return
    fi
    its_own preloaded >own
    comm -13 <(opened plain) <(opened preloaded) >more
    if [ "$(cat more)" = "$LIBRPCRDMA" ]; then ok "$name opens nothing but the library"; else FAIL "$name opens nothing but the library" more; fi
    # What is left without the calls for the library; the loader makes the mprotect call at the end.
    { calls preloaded | sed 's/^/+ /'; calls own | sed 's/^/- /'; echo "- 1 mprotect"; calls plain | sed 's/^/- /'; } |
        awk '{ n[$3] += ($1 "1") * $2 } END { for (name in n) if (n[name] != 0) print n[name], name }' >more
    local own=$(($(wc -l <own) + 1))
    # The loader may need another page for its list.
    if [ "$(cat more)" = "1 mmap" ]; then own=$((own + 1)); : >more; fi
    if [ "$own" -gt 1 ] && [ "$own" -le $CALLS ] && [ ! -s more ]; then
        ok "$name makes the same system calls, but $own to map the library"
    else
        FAIL "$name makes the same system calls, but $own to map the library" more
    fi
}

# ------------------------------------------------------------------------------------------------------------ memory

# resting VARIABLE COMMAND...: starts the command and waits until it reads from fd 0; sets pid. rested ends it.
resting() {
    local variable=$1 fd; shift
    exec {input}<> <(:)
    env "$variable" "${steady[@]}" "$@" <&"$input" >/dev/null 2>&1 &
    pid=$!; children+=("$pid")
    wait_for 10 grep -q '^0 0x0 ' "/proc/$pid/syscall"
}
rested() { exec {input}>&-; stop "$pid"; }
mapped() { awk '$6 ~ /^\// { print $6 }' "/proc/$pid/maps" | sort -u; }
# sum FIELD WHERE: KiB of the library, of others, or of all in $smaps.
sum() {
    awk -v field="$1:" -v library="$LIBRPCRDMA" -v where="$2" '
        /^[0-9a-f]+-[0-9a-f]+ / { is = where == "all" || (where == "library") == ($6 == library) }
        is && $1 == field { kib += $2 }
        END { print kib + 0 }' "$smaps"
}

# same_memory NAME COMMAND...: for a command that reads its standard input.
same_memory() {
    local name=$1; shift
    local written beside plain
    if ! resting "${without[0]}" "$@"; then
        rested
        skip "$name: memory" "/proc/PID/syscall tells nothing here"
        return
    fi
    mapped >plain.maps
    cat "/proc/$pid/smaps" >plain.smaps
    rested
    resting "${with[0]}" "$@" || { FAIL "$name runs with the library"; rested; return; }
    mapped >preloaded.maps
    cat "/proc/$pid/smaps" >preloaded.smaps
    rested
    comm -3 plain.maps preloaded.maps | tr -d '\t' >more
    if [ "$(cat more)" = "$LIBRPCRDMA" ]; then ok "$name maps nothing but the library"; else FAIL "$name maps nothing but the library" more; fi
    smaps=preloaded.smaps
    written=$(sum Anonymous library) present=$(sum Rss library) beside=$(sum Anonymous others) total=$(sum Rss all)
    smaps=plain.smaps
    beside=$((beside - $(sum Anonymous others)))
    plain=$(sum Rss all)
    if [ "$written" -gt 0 ] && [ "$written" -le $OWN ] && [ "$present" -le $MAPPED ] && [ "$beside" -le $BESIDE ]; then
        ok "$name: the library has written to $written KiB of its own and $beside beside, of $present KiB that are there (resident: $plain KiB without it, $total with it)"
    else
        FAIL "$name: the library has written to $written KiB of its own (at most $OWN) and $beside beside ($BESIDE), of $present KiB that are there ($MAPPED)"
    fi
}

python=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null)
command -v strace >/dev/null || skip "system calls" "strace is not installed"
for program in bash git "${python:-python3}"; do
    name=${program##*/}
    command -v "$program" >/dev/null || { skip "$name" "not installed"; continue; }
    case $name in
    bash) call=(bash -c :) rest=(bash -c 'read -r line') ;;
    git) call=(git hash-object /dev/null) rest=(git hash-object --stdin) ;;
    *) name=python3 call=("$program" -c pass) rest=("$program" -c 'import sys; sys.stdin.read()') ;;
    esac
    ! command -v strace >/dev/null || same_calls "$name" "${call[@]}"
    same_memory "$name" "${rest[@]}"
done

# --------------------------------------------------------------------------------------------- libtirpc, when it comes

build=$(dirname "$LIBRPCRDMA")
compile() { # OUTPUT FLAG...
    local output=$1; shift
    cc -g -O1 -Wall -Wextra -Werror -Wno-cast-function-type -o "$output" "$top/c-tests/preload.c" $(pkg-config --cflags libtirpc) \
        "$@" 2>cc.log || { FAIL "preload.c compiles" cc.log; closing; }
}
compile host -DHOST -ldl
compile plugin.so -shared -fPIC -Wl,--no-as-needed $(pkg-config --libs libtirpc)
compile alone -L"$build" -Wl,-rpath,"$build" -lrpcrdma
compile copies -DCOPIES -fno-pie -no-pie $(pkg-config --libs libtirpc)
# says NAME STATUS TEXT COMMAND...: checks both the status and what is written.
says() {
    local name=$1 status=$2 text=$3; shift 3
    "$@" >out 2>&1 </dev/null
    local got=$?
    if [ "$got" -eq "$status" ] && grep -Eq "$text" out; then ok "$name"; else FAIL "$name (status $got)" out; fi
}

readelf -dW host alone | grep -q 'NEEDED.*libtirpc' && FAIL "the programs are without libtirpc"
says "a plugin brings libtirpc into a program that has the library" 0 '^over rdma$' "${preloaded[@]}" ./host ./plugin.so
if readelf -rW copies | grep -q 'COPY.*svc_max_pollfd'; then
    says "a program that has libtirpc's variables as copies" 0 '^over rdma$' "${preloaded[@]}" ./copies
else
    skip "a program that has libtirpc's variables as copies" "this compiler makes no copy relocations"
fi
says "a program that is linked with this library only" 0 '^over rdma$' ./alone
if command -v valgrind >/dev/null; then
    says "the same under valgrind" 0 '^over rdma$' env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 ./alone
    if [ "$(cat out)" = "over rdma" ]; then ok "in silence"; else FAIL "in silence" out; fi
else
    skip "under valgrind" "not installed"
fi

# No libtirpc, and one that lacks nearly everything: the program is told, by the return value and in words.
mkdir none old
: >none/libtirpc.so.3
says "without libtirpc the program is told" 1 '^svc_tli_create: .*libtirpc cannot be loaded: .*libtirpc\.so\.3' \
    env LD_LIBRARY_PATH="$scratch/none" ./alone
cat >old.c <<'END'
struct { int status, error[3]; } why;
void *__rpc_createerr(void) { return &why; }
char *clnt_spcreateerror(const char *message) { static char text[] = "stock"; return message ? text : 0; }
END
echo 'TIRPC_0.3.0 { *; };' >old.map
cc -shared -fPIC -Wl,-soname,libtirpc.so.3 -Wl,--version-script=old.map -o old/libtirpc.so.3 old.c 2>cc.log ||
    FAIL "an old libtirpc compiles" cc.log
says "nor with one that lacks a function" 1 'libtirpc\.so\.3 has no [a-z_]+@TIRPC_0\.3\.0' \
    env LD_LIBRARY_PATH="$scratch/old" ./alone
closing
