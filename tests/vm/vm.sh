#!/bin/bash
# vm.sh [-t SECONDS] [-p PORT:GUESTPORT]... COMMAND [ARGUMENT...]: runs one command as root in a QEMU guest with a kernel
# of its own: the one that setup.sh has prepared last without a name, or with KERNEL=6.12 the one that it has by this name.
#
# The guest's root is this machine's, read-only over 9p, with memory on top: every program of the host runs there under
# its own path, and what it writes is lost at the end. No KVM is needed. What the command prints comes out here; the exit
# status is the command's, or 124 after -t (300) seconds, or 125 if the guest died; then the end of its console is shown.
#
# Of the environment TEST_PATIENCE and LIBRPCRDMA go along.
#
# The guest is 10.0.2.15 on eth0 and reaches the host's 127.0.0.1 as 10.0.2.2; -p forwards a TCP port of the host's
# 127.0.0.1 to one of the guest. There is no default route: what leaves a device that is down goes nowhere else.
set -eu
base=${RPCRDMA_VM:-$HOME/.cache/rpcrdma-vm}
limit=300
network=user,id=net
while getopts +t:p: option; do
    case $option in
    t) limit=$OPTARG ;;
    p) network+=,hostfwd=tcp:127.0.0.1:${OPTARG%:*}-10.0.2.15:${OPTARG#*:} ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
version=$(cat "$base/kernel${KERNEL:+-$KERNEL}")
kernel=$base/kernels/$version
cache=$base/cache/$version
modules=$cache/lib/modules/$version

exec 9>"$base/.lock"
flock 9
# A copy of the modules, siw among them, since depmod writes there.
if [ ! -e "$cache/ready" ] || [ "$0" -nt "$cache/ready" ]; then
    rm -rf "$cache" && mkdir -p "$cache/lib/modules"
    cp -a "$kernel/lib/modules/$version" "$modules"
    mkdir -p "$modules/extra" && cp "$base/extra/$version"/*.ko "$modules/extra/"
    depmod -b "$cache" "$version"

    # An initramfs with what is needed to reach the host's files.
    root=$cache/initrd.d
    mkdir -p "$root"/{bin,mod,proc,sys,dev,lower,rw,root}
    cp /bin/busybox "$root/bin/busybox"
    for module in virtio_pci virtio_console virtio_net 9pnet_virtio 9p overlay; do
        modprobe -d "$cache" -S "$version" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
        name=$(basename "${file%.xz}")
        echo "$name" >>"$root/mod/order"
        case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"$root/mod/$name"
    done
    cat >"$root/init" <<'INIT'
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc p /proc; $B mount -t sysfs s /sys; $B mount -t devtmpfs d /dev
while read m; do $B insmod /mod/$m || echo "init: insmod $m failed"; done </mod/order
$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /lower || echo "init: 9p failed"
$B mount -t tmpfs -o mode=755 rw /rw; $B mkdir /rw/up /rw/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work root /root || echo "init: overlay failed"
for d in proc sys dev; do $B mount --move /$d /root/$d; done
read job </root/proc/cmdline; job=${job##*vmjob=}; job=${job%% *}
exec $B switch_root /root /bin/busybox sh $job/stage2
INIT
    chmod 755 "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet | zstd -q -3 -f -o "$cache/initrd")

    # QEMU starts an unpacked kernel directly, which saves seconds: emulated, the kernel unpacks itself slowly. Linux's x86
    # boot protocol tells where the payload is: setup_sects, payload_offset, payload_length.
    image=$kernel/boot/vmlinuz-$version
    word() { od -An -tu4 -j "$1" -N4 "$image" | tr -d ' '; }
    start=$((($(od -An -tu1 -j $((0x1f1)) -N1 "$image") + 1) * 512 + $(word $((0x248)))))
    length=$(($(word $((0x24c))) - 4))
    for unpack in xz zstd gzip none; do
        [ $unpack != none ] || { echo "vm.sh: $image cannot be unpacked" >&2; exit 125; }
        tail -c +$((start + 1)) "$image" | head -c $length | $unpack -dc >"$cache/vmlinux" 2>/dev/null && break
    done
    touch "$cache/ready"
fi
flock -u 9

# On a busy host the clock of newer kernels runs fast with the processor's counter as QEMU emulates it, but not with ACPI's timer.
clock=tsc=reliable
case $version in [1-5].* | 6.*) ;; *) clock="tsc=unstable clocksource=acpi_pm" ;; esac

job=$(mktemp -d "$base/job.XXXXXX")
trap 'rm -rf "$job"' EXIT
{ echo "cd $(printf %q "$PWD"); export IN_GUEST=yes"
    for name in TEST_PATIENCE LIBRPCRDMA; do [ -z "${!name:-}" ] || printf 'export %s=%q\n' $name "${!name}"; done
    printf 'exec'; printf ' %q' "$@"; echo; } >"$job/cmd"
cat >"$job/stage2" <<END
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
mkdir -p /dev/pts /dev/shm /lib/modules
mount -t tmpfs -o mode=755 run /run
mount -t devpts -o ptmxmode=666 pts /dev/pts; mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd; ln -sf fd/0 /dev/stdin; ln -sf fd/1 /dev/stdout; ln -sf fd/2 /dev/stderr
mount --bind $(printf %q "$cache/lib/modules") /lib/modules
hostname vm
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
for port in /sys/class/virtio-ports/*; do
    case \$(cat \$port/name) in vm.out) out=/dev/\${port##*/} ;; vm.status) status=/dev/\${port##*/} ;; esac
done
(exec setsid bash $(printf %q "$job")/cmd </dev/null >\$out 2>&1)
echo \$? >\$status
# Port 0xf4 is QEMU's switch.
printf '\\0' | dd of=/dev/port bs=1 seek=244 count=1 2>/dev/null
poweroff -f
END
: >"$job/status"
# An end of its input would look to the guest as if nobody were listening any more.
mkfifo "$job/never"
exec 8<>"$job/never"
timeout -k 5 "$limit" qemu-system-x86_64 \
    -machine q35,vmport=off -accel tcg,thread=multi,tb-size=512 -cpu max -smp 2 -m 3G \
    -nodefaults -no-user-config -display none -no-reboot -monitor none \
    -kernel "$cache/vmlinux" -initrd "$cache/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check $clock random.trust_cpu=on vmjob=$job" \
    -serial "file:$job/console" -device isa-debug-exit,iobase=0xf4,iosize=0x01 -device virtio-serial-pci \
    -chardev stdio,id=out,signal=on,mux=off -device virtserialport,chardev=out,name=vm.out \
    -chardev "file,id=status,path=$job/status" -device virtserialport,chardev=status,name=vm.status \
    -netdev "$network" -device virtio-net-pci,netdev=net,romfile= \
    -object rng-random,id=rng0,filename=/dev/urandom -device virtio-rng-pci,rng=rng0 \
    -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap" <&8 9>&- &
qemu=$!
trap 'kill "$qemu" 2>/dev/null' INT TERM HUP
ended=0
wait "$qemu" || ended=$?
[ "$ended" != 124 ] && [ "$ended" != 137 ] || { echo "vm.sh: not done after $limit s" >&2; tail -n 5 "$job/console" >&2; exit 124; }
status=$(tr -d '\r\n' <"$job/status")
[ -n "$status" ] || { echo "vm.sh: the guest died ($ended)" >&2; tail -n 30 "$job/console" >&2; exit 125; }
exit "$status"
