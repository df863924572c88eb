#!/bin/bash
# nfs.sh: the examples' NFS version 3 client and server against those of the Linux kernel, over RDMA: our software iWARP
# at one end, the kernel's siw and NFS/RDMA at the other. Run by `make check-vm`; `nfs.sh guest` is its part in the guest.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
programs=$top/build/nfs3
base=${RPCRDMA_VM:-$HOME/.cache/rpcrdma-vm}

if [ "${1:-}" != guest ]; then
    command -v qemu-system-x86_64 >/dev/null && [ -d "$base/extra" ] || { skip "the kernel's NFS/RDMA" "run tests/vm/setup.sh as root first"; closing; }
    [ -r "$LIBRPCRDMA" ] && [ -x "$programs/nfs3d" ] || { FAIL "make and make nfs3 come first"; closing; }
    exec bash "$here/vm.sh" -t "${LIMIT:-400}" bash "${BASH_SOURCE[0]}" guest
fi

must() { "$@" >"$scratch/must" 2>&1 || { FAIL "$*" "$scratch/must"; closing; }; }
address=192.168.77.1
must ip link add dummy0 type dummy
must ip link set dummy0 mtu 9000 up
must ip addr add $address/24 dev dummy0
must modprobe -a siw ib_uverbs rdma_ucm nfsd rpcrdma
must rdma link add siw0 type siw netdev dummy0
must wait_for 10 grep -qs ACTIVE /sys/class/infiniband/siw0/ports/1/state

# The kernel's server on port 20049, with a tmpfs: an overlay cannot be exported.
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /run/rpcbind /run/sendsigs.omit.d /export /served /mnt
must mount -t nfsd nfsd /proc/fs/nfsd
must mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
: >/var/lib/nfs/etab; : >/var/lib/nfs/rmtab
must mount -t tmpfs -o size=512m export /export
must mount -t tmpfs -o size=512m served /served
must rpcbind -w
must exportfs -o rw,fsid=0,no_root_squash,insecure,no_subtree_check,async '*:/export'
must rpc.nfsd --no-udp --nfs-version 3 8
must rpc.mountd --no-udp
echo rdma 20049 >/proc/fs/nfsd/portlist || { FAIL "nfsd listens on RDMA"; closing; }
mount_port=$(rpcinfo -p | awk '$1 == 100005 && $2 == 3 && $3 == "tcp" { print $4; exit }')
head -c 16777216 /dev/urandom >"$scratch/random"
sizes=(0 1 3 5 399 400 401 1023 4095 4096 4097 65535 65536 65537 262143 262144 1048575 1048576 5000001 16777216)

client=("${preloaded[@]}" timeout 120 "$programs/nfs3" -n rdma -p 20049 -m "$mount_port" -e /export)
for own in '' -P; do
    what="our client, the kernel's server"
    [ -z "$own" ] || what+=", a buffer of its own"
    # tmpfs has no stable cookies: names that go while they are listed hide others.
    if "${client[@]}" $own $address check -N 0 -L 1,2,3,255,1000 "${sizes[@]}" >"$scratch/out" 2>&1; then
        ok "$what: $(cat "$scratch/out")"
    else
        FAIL "$what" "$scratch/out"
    fi
done
if "${client[@]}" $address put "$scratch/random" random && cmp "$scratch/random" /export/random; then ok "16 MiB lie at the kernel's server as they were"; else FAIL "16 MiB at the kernel's server"; fi
mkdir /export/names && (cd /export/names && for i in {1..300}; do : >"name $i"; done)
if [ "$("${client[@]}" $address ls /names | grep -c '^name ')" = 300 ]; then ok "300 names, listed"; else FAIL "300 names, listed"; fi
# The first message right after the startup meets a race in siw; nobody may see it.
before=$SECONDS
for ((i = 0; i < 20; i++)); do "${client[@]}" $address stat /random >/dev/null || FAIL "connection $i"; done
if [ $((SECONDS - before)) -lt 40 ]; then ok "20 connections, one after the other"; else FAIL "20 connections took $((SECONDS - before)) s"; fi

log=$scratch/server.log
start_ready "${preloaded[@]}" RPCRDMA_LOG=info "$programs/nfs3d" -n rdma -d /served -a 0.0.0.0 -p 20050 -m 20051 || { FAIL "our server" "$log"; closing; }
options=rdma,port=20050,vers=3,nolock,mountproto=tcp,mountport=20051,mountvers=3
mounted() { timeout 60 mount -t nfs -o $options $address:/ /mnt; }
mounted || { FAIL "the kernel mounts our server" "$log"; closing; }
ok "the kernel mounts our server"
for size in "${sizes[@]}"; do head -c "$size" "$scratch/random" >/mnt/file.$size; done
umount /mnt && mounted
wrong=
for size in "${sizes[@]}"; do
    head -c "$size" "$scratch/random" >"$scratch/part"
    cmp -s "$scratch/part" /served/file.$size && cmp -s "$scratch/part" /mnt/file.$size || wrong+=" $size"
done
if [ -z "$wrong" ]; then ok "files of ${#sizes[@]} sizes, written and read back"; else FAIL "files of$wrong bytes"; fi
dd if="$scratch/random" of=/mnt/one bs=4097 status=none & dd if="$scratch/random" of=/mnt/two bs=65537 status=none
wait $!
if cmp -s "$scratch/random" /served/one && cmp -s "$scratch/random" /served/two; then ok "two writers, odd blocks"; else FAIL "two writers, odd blocks"; fi
git init -q "$scratch/repository" && cp -r "$top/src" "$scratch/repository" && cd "$scratch/repository" && git add -A &&
    git -c user.name=n -c user.email=n@n commit -qm all && cd /
if git clone -q "$scratch/repository" /mnt/clone && git -C /mnt/clone fsck >"$scratch/out" 2>&1 &&
    diff -r "$top/src" /served/clone/src >"$scratch/out"; then ok "git clone, fsck"; else FAIL "git clone, fsck" "$scratch/out"; fi
# Read, Write and Reply chunks, and the bytes of Calls and Replies that travelled in them.
read -r -a xprt <<<"$(grep -A40 ' /mnt ' /proc/self/mountstats | grep -m 1 'xprt:.*rdma')"
counted="${xprt[12]} Read, ${xprt[13]} Write, ${xprt[14]} Reply chunks; ${xprt[15]} bytes there, ${xprt[16]} back"
if [ "${xprt[15]}" -gt 16777216 ] && [ "${xprt[16]}" -gt 16777216 ]; then ok "mountstats: $counted"; else FAIL "mountstats: $counted"; fi
if umount /mnt; then ok "umount"; else FAIL "umount"; fi
closing
