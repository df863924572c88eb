#!/bin/bash
# commands.sh: every command that README.md and the pages in docs/ tell a user to type. Each is run here as it is written
# there, in a private network where a host `filer` serves NFS; or it is run by a test that takes longer or needs more, and
# is named below. Any other command fails.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${COMMANDS_IN_NS:-}" ]; then
    if ! reason=$(bash "$here/ns.sh" --possible); then
        . "$here/lib.sh"
        skip "the commands of README.md and docs/" "$reason"
        closing
    fi
    COMMANDS_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}"
fi
export RPCRDMA_PROVIDER=auto    # as a user has it
. "$here/lib.sh"

# What is run elsewhere: a bash pattern, the file of the test that runs it, and a word that must be found in that file.
elsewhere=(
    'apt install make' tests/long/fresh.sh 'install'
    'make demo' tests/demo.sh 'demo.sh'
    'make check' .ci/run 'make check'
    'sudo apt install dpkg-dev*' tests/long/packages.sh 'dpkg'
    'make deb' tests/long/packages.sh 'deb'
    'sudo apt install ./build/packages/*' tests/long/packages.sh 'apt'
    'sudo apt purge*' tests/long/packages.sh 'purge'
    'make uninstall*' tests/build.sh 'uninstall'
    'make install*' tests/readme.sh 'make -s -C "$top" install'
    'ldconfig' tests/readme.sh 'LD_LIBRARY_PATH'    # what it is for; the system's own cache is not a test's to change
    'make' tests/build.sh 'make'
    'cc hello.c *' tests/readme.sh 'hello.c'
    'make bench' bench/bench.sh 'bench'
    'make bench-instructions' bench/instructions.sh 'instructions'
    'make soak *' tests/long/soak.sh 'make soak'
    'sudo tests/vm/setup.sh' .ci/run 'tests/vm/setup.sh'
    'make check-vm' .ci/run 'make check-vm'
    'make check-vm KERNEL=*' Makefile 'KERNEL'
    'mount -t nfs *proto=rdma*' tests/vm/guest.sh 'proto='
    'echo rdma 20049 >*portlist' tests/vm/guest.sh 'portlist'
    'make nfs3' Makefile 'nfs3:'
    'make nfs41' Makefile 'nfs41:'
    'rpcrdma-run build/nfs41/nfs41d *' tests/nfs41.sh 'nfs41d'
    'rpcrdma-run build/nfs41/nfs41 *' tests/nfs41.sh 'nfs41'
    './hello *' tests/readme.sh './hello'
    'rpcrdma perf' tests/perf.sh 'perf'
    'rpcrdma top' tests/stat.sh 'rpcrdma top'
    'rpcrdma-run ./my_rpc_server' tests/pairs.sh 'RPCRDMA_REDIRECT'
)

# The commands of a page, one per line: from blocks that are indented by four columns, or fenced as `sh`; without the prompt,
# trailing comments, and what is only shown: output, settings, C.
commands_of() {
    awk '
        /^```sh$/ { fenced = 1; next } /^```/ { other = fenced ? 0 : !other; fenced = 0; next }
        other { next }
        fenced { print; next }
        # Indented lines are code only where no list goes on.
        /^[-*] / { list = 1 } /^[^ -]/ { list = 0 }
        /^    / && !list { print substr($0, 5) }' "$1" |
        sed -E 's/^\$ //; s/[ \t]+#.*$//; s/[ \t]+&$/ \&/' |
        grep -E '^((export )?[A-Z_]+=[^ ]+ )*(sudo |rpcrdma-run |rpcrdma |make\b|apt |cc |\./|ldconfig|mount |echo |tests/)|^export [A-Z_]+='
}

stage=$scratch/stage
make -s -C "$top" install PREFIX="$stage" SYSCONFDIR="$stage/etc" >"$scratch/install" 2>&1 || { FAIL "make install" "$scratch/install"; closing; }
make -s -C "$top" nfs3 >"$scratch/nfs3.log" 2>&1 || { FAIL "make nfs3" "$scratch/nfs3.log"; closing; }
export PATH=$stage/bin:$PATH:/usr/sbin:/sbin LD_LIBRARY_PATH=$stage/lib
cd "$top" || exit 1
{ cat /etc/hosts; echo 127.0.0.1 filer; } >"$scratch/hosts"
mount --bind "$scratch/hosts" /etc/hosts
mkdir "$scratch/srv"
[ -d /srv ] && mount --bind "$scratch/srv" /srv
log=$scratch/server.log
start_ready env RPCRDMA_REDIRECT=tcp rpcrdma-run build/nfs3/nfs3d -n rdma -d /srv ||
    { FAIL "the filer serves" "$log"; closing; }

# Each page has a shell of its own for its commands, where `export` lasts; what runs in the background ends with the page.
for page in README.md docs/*.md; do
    commands_of "$page" >"$scratch/commands"
    settings= started=()
    while IFS= read -r -u 3 command; do
        covered=
        for ((i = 0; i < ${#elsewhere[@]}; i += 3)); do
            [[ $command == ${elsewhere[i]} || $command == "${elsewhere[i]} "* && ${elsewhere[i]} == make\ * ]] || continue
            if grep -Fq -- "${elsewhere[i + 2]}" "${elsewhere[i + 1]}"; then covered=${elsewhere[i + 1]}
            else FAIL "$page: $command: ${elsewhere[i + 1]} does not run it"; covered=-; fi
            break
        done
        case $covered,$command in
        -,*) continue ;;
        ?*,*) ok "$page: $command: $covered"; continue ;;
        ,export\ *) settings+="$command; "; ok "$page: $command"; continue ;;
        ,*\&)
            bash -c "${settings}exec ${command% &}" >"$scratch/out" 2>&1 & children+=($!) started+=($!)
            if wait_for 10 grep -qs READY "$scratch/out"; then ok "$page: $command"; else FAIL "$page: $command" "$scratch/out"; fi
            continue ;;
        esac
        # A command that goes on until Ctrl-C gets one SIGINT; only one, since a group would get another.
        timeout --foreground --preserve-status -s INT -k 20 "$(patient 20)" bash -c "$settings$command" >"$scratch/out" 2>&1 </dev/null
        status=$?
        if [ $status -eq 0 ]; then ok "$page: $command"; else FAIL "$page: $command (status $status)" "$scratch/out"; fi
    done 3<"$scratch/commands"
    for pid in "${started[@]}"; do stop "$pid"; done
done
closing
