#!/bin/bash
# host.sh: the kernel's NFS/RDMA over siw in a guest, with our client and server, over software iWARP, on this host. They talk
# through QEMU's network, as between two machines. Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
sizes=(0 1 399 400 401 4095 4096 4097 65536 65537 1048575 1048576 5000001)

# host.sh PORT MOUNTPORT is the part in the guest: the kernel's server, and its client towards ours at these ports.
if [ -n "${IN_GUEST:-}" ]; then
    path=iwarp
    address=10.0.2.2
    device_up eth0
    nfsd_up
    mkdir /export/names && (cd /export/names && for i in {1..300}; do : >"name $i"; done)
    echo READY
    what="the kernel's client in the guest, our server on the host"
    if mounted "$1" "$2"; then ok "$what: mounted"; else FAIL "$what: mounted"; closing; fi
    head -c 16777216 /dev/urandom >"$scratch/random"
    wrong=
    for size in "${sizes[@]}"; do head -c "$size" "$scratch/random" >/mnt/file.$size; done
    timed dd if="$scratch/random" of=/mnt/random bs=1M conv=fsync status=none
    written=$(rate 16777216)
    must umount /mnt
    must mounted "$1" "$2"
    if timed cmp "$scratch/random" /mnt/random; then ok "$what: 16 MiB written ($written) and read ($(rate 16777216))"
    else FAIL "$what: 16 MiB"; fi
    for size in "${sizes[@]}"; do
        head -c "$size" "$scratch/random" | cmp -s - /mnt/file.$size || wrong+=" $size"
    done
    if [ -z "$wrong" ]; then ok "$what: files of ${#sizes[@]} sizes"; else FAIL "$what: files of$wrong bytes"; fi
    (cd /mnt && sha256sum random file.* >sums)
    if umount /mnt; then ok "$what: umount"; else FAIL "$what: umount"; fi
    # The host's client creates a file when it has finished.
    wait_for 120 test -e /export/finished || FAIL "the client on the host finishes"
    echo "lies there: $(sha256sum </export/random)"
    closing
fi

needs_guest "the kernel's NFS/RDMA in the guest, with this host"
export RPCRDMA_PROVIDER=iwarp
mkdir "$scratch/served"
log=$scratch/server.log
start_ready "${preloaded[@]}" RPCRDMA_LOG=info "$programs/nfs3d" -n rdma -d "$scratch/served" -a 127.0.0.1 ||
    { FAIL "our server starts" "$log"; closing; }
free_port() {
    local port=$1
    while [ -n "$(ss -Hltn "sport = :$port")" ]; do port=$((port + 2)); done
    echo $port
}
nfs_port=$(free_port 22220) mount_port=$(free_port 22221)
# shellcheck disable=SC2086 # two ports
bash "$here/vm.sh" -t "${LIMIT:-$(patient 300)}" -p "$nfs_port:20049" -p "$mount_port:20048" bash "${BASH_SOURCE[0]}" $port \
    >"$scratch/guest" 2>&1 &
vm=$!; children+=($vm)
wait_for 60 grep -q READY "$scratch/guest" || { FAIL "the guest starts" "$scratch/guest"; closing; }

nfs3=("${preloaded[@]}" "$programs/nfs3" -n rdma -p "$nfs_port" -m "$mount_port" -e /export)
client=(timeout "$(patient 120)" "${nfs3[@]}")
what="our client on the host, the kernel's server in the guest"
for crc in auto yes; do
    if timed env RPCRDMA_CRC=$crc "${client[@]}" 127.0.0.1 check -N 0 -L 1,3,255 "${sizes[@]}" >"$scratch/out" 2>&1; then
        ok "$what, CRC $crc: $(cat "$scratch/out") ($(seconds))"
    else
        FAIL "$what, CRC $crc" "$scratch/out"
    fi
done
random=$scratch/random
head -c 16777216 /dev/urandom >"$random"
timed "${client[@]}" 127.0.0.1 put "$random" random
written=$(rate 16777216)
if timed "${client[@]}" 127.0.0.1 get random "$scratch/got" && cmp "$random" "$scratch/got"; then
    ok "$what: 16 MiB written ($written) and read ($(rate 16777216))"
else
    FAIL "$what: 16 MiB"
fi
if [ "$("${client[@]}" 127.0.0.1 ls /names | grep -c '^name ')" = 300 ]; then ok "$what: 300 names, listed"
else FAIL "$what: 300 names, listed"; fi
# The first message right after the startup meets a race in siw; nobody may see it.
twenty_connections() {
    local i
    for ((i = 0; i < 20; i++)); do timeout "$(patient 10)" "${nfs3[@]}" 127.0.0.1 stat /random >"$scratch/out" 2>&1 || return; done
}
if timed twenty_connections; then ok "$what: 20 connections, one after the other ($(seconds))"
else FAIL "$what: 20 connections, of which one took too long" "$scratch/out"; fi
"${client[@]}" 127.0.0.1 put /dev/null finished

wait "$vm" || FAIL "the guest's part"
grep -v '^READY\|^lies there' "$scratch/guest"
if grep -q "^lies there: $(sha256sum <"$random")" "$scratch/guest"; then ok "$what: 16 MiB lie there as they were"
else FAIL "$what: 16 MiB lie there as they were"; fi
what="the kernel's client in the guest, our server on the host"
if (cd "$scratch/served" && sha256sum --quiet -c sums) >"$scratch/out" 2>&1; then ok "$what: the files lie here as they were"
else FAIL "$what: the files lie here as they were" "$scratch/out"; fi
closing
