# Sourced by the other tests in this folder, on the host and in the guest: lib.sh, how a script is handed over to a guest
# (vm.sh), and what the guest consists of: an RDMA device, and the kernel's NFS server. Needs bash.
#
# A "path" is what our end uses: `iwarp`, our software iWARP, towards the kernel's siw; `verbs/rxe` and `verbs/siw`,
# libibverbs on the same device as the kernel.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
programs=$top/build/nfs3
programs41=$top/build/nfs41
address=192.168.77.1

# On the host: ends the script if there can be no guest, or nothing to run in it. NAME is for the skip line.
needs_guest() {
    local base=${RPCRDMA_VM:-$HOME/.cache/rpcrdma-vm} load
    # A guest sees only its own load, but everything that it shares a processor with slows it down, since it is emulated.
    read -r load _ </proc/loadavg
    export TEST_PATIENCE=${TEST_PATIENCE:-$(awk -v load="$load" -v processors="$(nproc)" 'BEGIN { print 1 + load / processors }')}
    command -v qemu-system-x86_64 >/dev/null || { skip "$1" "no qemu-system-x86_64: tests/vm/setup.sh installs it"; closing; }
    local has=$base/kernel${KERNEL:+-$KERNEL}
    [ -e "$has" ] || { skip "$1" "no guest in $base: run tests/vm/setup.sh${KERNEL:+ $KERNEL} as root first"; closing; }
    [ -z "${KERNEL:-}" ] || echo "the guest's kernel: $(cat "$has")"
    [ -r "$LIBRPCRDMA" ] && [ -x "$programs/nfs3d" ] && [ -x "$programs41/nfs41d" ] ||
        { FAIL "make, make nfs3 and make nfs41 come first"; closing; }
}
# run_in_guest NAME SECONDS SCRIPT [PATH...]: on the host, runs the script in one guest for each of the paths (default: all
# that the library has), and exits. In the guest it returns, with `path` set.
run_in_guest() {
    local name=$1 seconds=$2 script=$3 status=0; shift 3
    if [ -z "${IN_GUEST:-}" ]; then
        needs_guest "$name"
        [ $# -gt 0 ] || set -- iwarp verbs/rxe verbs/siw
        for path in "$@"; do
            if ! has_provider "${path%/*}"; then skip "$name over $path" "not built in"; continue; fi
            bash "$here/vm.sh" -t "${LIMIT:-$(patient "$seconds")}" bash "$(realpath "$script")" "$path" || status=1
        done
        exit $status
    fi
    path=$1
    # The tests' ordinary users may read the checkout, wherever it is: only the guest sees this change.
    local place=$top
    while [ "$place" != / ]; do must chmod o+x "$place"; place=$(dirname "$place"); done
    # No cleanup: the guest goes away as a whole, and processes that wait in the kernel cannot be killed.
    trap - EXIT
    # libtirpc binds without SO_REUSEADDR: a port with old connections would be refused for a minute after a restart.
    must sysctl net.ipv4.tcp_max_tw_buckets=0
}
has_provider() {
    ! RPCRDMA_PROVIDER=$1 "${preloaded[@]}" "$programs/nfs3" -n rdma -p 1 -H 00 127.0.0.1 ls / 2>&1 | grep -q 'not built in'
}

# must COMMAND...: what the test cannot go on without.
must() { "$@" >"$scratch/must" 2>&1 || { FAIL "$*" "$scratch/must"; closing; }; }

# timed COMMAND...: runs the command; then `micros` is how long it took, and seconds and rate BYTES print that.
timed() {
    local from=${EPOCHREALTIME/./} status
    "$@"; status=$?
    micros=$((${EPOCHREALTIME/./} - from))
    return $status
}
seconds() { printf '%d.%02d s' $((micros / 1000000)) $((micros / 10000 % 100)); }
rate() { echo "$(seconds), $(($1 * 10 / micros / 10)).$(($1 * 10 / micros % 10)) MB/s"; }

# device_up [NETDEV]: creates the RDMA device for the path, on dummy0 or another netdev, and makes our programs use it.
device_up() {
    local type=${path#*/} netdev=${1:-dummy0}
    [ "$type" != iwarp ] || type=siw
    device=${type}0
    export RPCRDMA_PROVIDER=${path%/*}
    if [ "$netdev" = dummy0 ]; then
        must ip link add dummy0 type dummy
        must ip link set dummy0 mtu 9000 up
        must ip addr add $address/24 dev dummy0
    fi
    case $type in rxe) must modprobe rdma_rxe ;; *) must modprobe "$type" ;; esac
    must modprobe -a ib_uverbs rdma_ucm rpcrdma
    must rdma link add "$device" type "$type" netdev "$netdev"
    must wait_for 10 grep -qs ACTIVE "/sys/class/infiniband/$device/ports/1/state"
}
# Removes the device, which waits for whoever still has it open: nobody, once our programs have ended.
device_down() {
    if timed timeout "$(patient 20)" rdma link del "$device"; then ok "$path: the device can be taken away ($(seconds))"
    else FAIL "$path: the device is still in use after $(seconds)"; fi
}

# The kernel's server, with NFS versions 3 and 4 on RDMA port 20049 and MOUNT on TCP port 20048; /export is an ext4 in
# memory, since an overlay cannot be exported, and nfsd 6.1 reads zeros from a tmpfs that has holes, over tcp too.
nfsd=(rpc.nfsd --no-udp --nfs-version 3)
nfsd_up() {
    must modprobe nfsd
    mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /run/rpcbind /run/sendsigs.omit.d /export
    must mount -t nfsd nfsd /proc/fs/nfsd
    # The default follows the guest's memory, and would be 512 KiB.
    must tee /proc/fs/nfsd/max_block_size <<<1048576
    # The shortest lease of version 4.
    must tee /proc/fs/nfsd/nfsv4leasetime <<<10
    must mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
    : >/var/lib/nfs/etab; : >/var/lib/nfs/rmtab
    must modprobe brd rd_nr=1 rd_size=$((512 << 10))
    must mkfs.ext4 -q -m 0 -O ^has_journal -E nodiscard /dev/ram0
    must mount -t ext4 /dev/ram0 /export
    must rmdir /export/lost+found
    must rpcbind -w
    must exportfs -o rw,fsid=0,no_root_squash,insecure,no_subtree_check,async '*:/export'
    nfsd_threads
    must rpc.mountd --no-udp --port 20048
}
nfsd_threads() {
    must "${nfsd[@]}" 8
    echo rdma 20049 >/proc/fs/nfsd/portlist || { FAIL "nfsd listens on RDMA"; closing; }
}
# Our client for this server; `client` adds a time limit.
nfs3=("${preloaded[@]}" "$programs/nfs3" -n rdma -p 20049 -m 20048 -e /export)
client=(timeout "$(patient 120)" "${nfs3[@]}")

# free PORT: waits until no TCP socket is left at a port of ours. The kernel's siw closes the sockets of a killed process only
# after a while, and libtirpc binds without SO_REUSEADDR.
free() {
    wait_for 30 no_socket_at "$1" || { cat /proc/net/tcp >"$scratch/tcp"; FAIL "port $1 is free again" "$scratch/tcp"; closing; }
}
no_socket_at() { ! awk '{ print $2 }' /proc/net/tcp | grep -q ":$(printf %04X "$1")\$"; }

# server_up [OPTION...]: starts our server of /served, a tmpfs, on RDMA port 20050, with MOUNT on TCP port 20051. Its log is in
# $log.
server_up() {
    if ! mountpoint -q /served; then
        mkdir -p /served /mnt
        must mount -t tmpfs -o size=512m served /served
        must modprobe nfs
    fi
    log=$scratch/server.log
    free 20050; free 20051
    start_ready "${preloaded[@]}" RPCRDMA_LOG=info "$programs/nfs3d" -n rdma -d /served -a 0.0.0.0 -p 20050 -m 20051 "$@" ||
        { FAIL "our server starts" "$log"; closing; }
}
# mounted [PORT MOUNTPORT]: mounts with the kernel's client, on /mnt.
mounted() {
    local options=rdma,port=${1:-20050},vers=3,nolock,mountproto=tcp,mountport=${2:-20051},mountvers=3
    timeout "$(patient 60)" mount -t nfs -o $options $address:/ /mnt
}
