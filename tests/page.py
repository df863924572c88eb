"""page.py KIND: holds a file in memory that looks like a page of figures (src/stats/layout.rs), as anybody's process may show it
to `rpcrdma stat`, and prints READY."""
import fcntl
import os
import random
import struct
import sys
import time

kind = sys.argv[1]
HEAD, COUNTERS, SLOTS, SLOT, HISTOGRAMS, HISTOGRAM = 32, 96, 256, 40, 128, 120
size = (8 * (HEAD + COUNTERS + SLOTS * SLOT + HISTOGRAMS * HISTOGRAM) + 65535) // 65536 * 65536
words = [0] * (size // 8)
slots, histograms = HEAD + COUNTERS, HEAD + COUNTERS + SLOTS * SLOT
magic = struct.unpack("=Q", b"rpcrdma\x01")[0]
words[0:14] = [magic, 1, size, 8 * HEAD, 22, 8 * slots, 8 * SLOT, SLOTS, 8 * histograms, 8 * HISTOGRAM, HISTOGRAMS,
               os.getpid(), int(time.time() * 1e9), 0]


def text(at, what, room):
    words[at:at + room] = struct.unpack("=%dQ" % room, what[:8 * room].ljust(8 * room, b"\0"))


text(16, b"0.1.0", 4)
text(20, b"made-up", 8)
text(slots + 4, b"a device", 8)
words[slots + 1] = 1
words[slots + 12:slots + 16] = [4 << 32 | 111, 0, 0, 0x7f000001]
if kind == "escapes":
    nasty = "\x1b[2J\x1b]0;t\x07\u009b31m\u202e\u061c\uffff\"\\\n{},=# ".encode()
    text(20, nasty, 8)
    text(16, nasty, 4)
    text(slots + 4, nasty, 8)
elif kind == "long":
    text(20, b"W" * 64, 8)
    text(slots + 4, b"M" * 64, 8)
elif kind == "numbers":
    words[12:16] = [2 ** 64 - 1] * 4
    words[HEAD:] = [2 ** 64 - 1] * (len(words) - HEAD)
elif kind == "random":
    random.seed(20261125)
    words[HEAD:] = [random.getrandbits(64) for _ in words[HEAD:]]
elif kind == "many":
    # Nested tables, in a page of the greatest length.
    size = 16 << 20
    words += [2] * (size // 8 - len(words))
    words[2] = size
    rest = size - 8 * slots
    words[5:11] = [8 * slots, 8 * SLOT, rest // (8 * SLOT), 8 * slots, 8 * HISTOGRAM, rest // (8 * HISTOGRAM)]
elif kind == "newer":
    words[1] = 2
elif kind == "damaged":
    words[5] = 1 << 63
page = os.memfd_create("rpcrdma-stats", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.write(page, struct.pack("=%dQ" % len(words), *words))
if kind == "cut":
    os.ftruncate(page, 4096)
if kind != "shrinks":
    fcntl.fcntl(page, 1033, 2)    # F_ADD_SEALS, F_SEAL_SHRINK
print("READY 0", flush=True)
while kind == "shrinks":
    os.ftruncate(page, 0)
    os.ftruncate(page, size)
time.sleep(1000)
