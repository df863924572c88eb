#!/bin/bash
# ns.sh COMMAND...: a private network for one command.
# ns.sh --possible: says why there can be none, and fails; or prints nothing and succeeds.
#
# Gives COMMAND a private network (loopback only), a private /run, private process ids and a stock rpcbind of its
# own, so that servers can take the ports and the program numbers that they have in real use without disturbing the
# machine. When COMMAND ends, everything that it started ends too. Needs root: rpcbind itself refuses to run for an
# ordinary user, even inside a user namespace.
#
# Environment: NO_RPCBIND=1 leaves rpcbind out.
set -u
PATH=$PATH:/usr/sbin:/sbin
if [ "${1:-}" = --possible ]; then
    [ "$(id -u)" -eq 0 ] || { echo "needs root"; exit 1; }
    for tool in ip rpcbind rpcinfo; do type -P $tool >/dev/null || { echo "$tool is not installed"; exit 1; }; done
    [ -e /etc/services ] || { echo "there is no /etc/services, which rpcbind needs"; exit 1; }
    # Not possible in a plain chroot, whose root is no mount point.
    unshare --net --mount --pid --fork --mount-proc true 2>/dev/null || { echo "no private network can be made here"; exit 1; }
    exit 0
fi
if [ "${RPCRDMA_NS:-}" != entered ]; then
    RPCRDMA_NS=entered exec unshare --net --mount --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
unset RPCRDMA_NS
mount -t tmpfs tmpfs /run
mount -t sysfs sysfs /sys 2>/dev/null      # /sys/class/net of the new network, where the sandbox allows it
ip link set lo up
if [ -z "${NO_RPCBIND:-}" ]; then
    mkdir -p /run/rpcbind /run/sendsigs.omit.d
    chown _rpc /run/rpcbind 2>/dev/null
    rpcbind -f -w >/dev/null 2>&1 &
    for _ in $(seq 400); do
        rpcinfo -s 127.0.0.1 >/dev/null 2>&1 && break
        sleep 0.05
    done
    rpcinfo -s 127.0.0.1 >/dev/null 2>&1 || { echo "ns.sh: rpcbind does not answer" >&2; exit 1; }
fi
"$@"
