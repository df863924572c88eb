/* RPC over RDMA for programs that use libtirpc. Made by cbindgen from src/capi.rs: do not edit. */

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>
#include <rpc/rpc.h>

// clnt_control: sets the longest reply that later calls of a CLIENT make room for, in bytes of results.
// Takes a pointer to size_t. The default is the setting max_reply, 16 MiB.
#define CLSET_RDMA_MAXREPLY 1380207873

// clnt_control: gets the longest reply that calls of a CLIENT make room for, as a size_t. FALSE says that the
// CLIENT does not go over RDMA.
#define CLGET_RDMA_MAXREPLY 1380207874

// What this process has done since it began; see rpcrdma_stats_get(). Every counter only grows.
struct rpcrdma_stats {
  // Calls given to the transport by this process as a client.
  uint64_t calls;
  // Replies that completed such a call.
  uint64_t replies;
  // Requests handed to a program of this process as a server.
  uint64_t served;
  // Payload bytes sent or received inside RDMA_MSG.
  uint64_t bytes_inline;
  // Bytes moved by our RDMA Reads.
  uint64_t bytes_read;
  // Bytes moved by our RDMA Writes.
  uint64_t bytes_written;
  // Payload bytes copied in user space, beyond what the device does.
  uint64_t bytes_copied;
  // Payload bytes copied out of a socket's read-ahead buffer; not part of `bytes_copied`.
  uint64_t bytes_read_ahead;
  // Handles exposed to a peer.
  uint64_t registrations;
  // Handles that were invalidated, by us or by the peer.
  uint64_t invalidations;
  // Sends posted.
  uint64_t sends;
  // Receives completed.
  uint64_t receives;
  // System calls on the data path.
  uint64_t syscalls;
  // Connections established, both ends counted.
  uint64_t connections;
  // Calls that had to wait for a credit.
  uint64_t credits_waited;
  // RDMA_ERROR messages sent.
  uint64_t errors_sent;
  // RDMA_ERROR messages received.
  uint64_t errors_received;
  // Connections made again for a handle that had lost its own.
  uint64_t reconnects;
  // Clients that were to use rdma and use tcp.
  uint64_t fallbacks;
  // Calls that timed out with their credit still out.
  uint64_t orphans;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that is loaded, such as "0.1.0". It is never freed.
const char *rpcrdma_version(void);

// Copies the counters of this process to *stats. `size` is sizeof *stats as the program was compiled: a program
// and a library of different age understand each other, and counters that the library does not have are 0.
// FALSE, and *stats untouched, for NULL or a size that is no multiple of a counter's.
//
// # Safety
// `stats` is NULL or has room for `size` bytes.
bool_t rpcrdma_stats_get(struct rpcrdma_stats *stats,
                         size_t size);

// Makes a CLIENT for a program at the RDMA listener `raddr`, as clnt_vc_create() does for TCP: RDMA or an error.
//
// `fd` is a TCP socket, connected or not, on which nothing has been sent; it stays the caller's unless
// clnt_control(CLSET_FD_CLOSE) gives it away. With RPC_ANYFD the socket is made here and belongs to the CLIENT.
// `raddr` may be NULL if `fd` is connected. CLIENTs made on one socket share its connection. Buffer sizes have no meaning over RDMA and are accepted as they are.
//
// NULL on failure: clnt_pcreateerror() prints why.
//
// # Safety
// `raddr` is NULL or a netbuf whose buffer holds `len` bytes.
CLIENT *clnt_rdma_create(int fd,
                         const struct netbuf *raddr,
                         rpcprog_t prog,
                         rpcvers_t vers,
                         unsigned int sendsz,
                         unsigned int recvsz);

// Makes a transport that serves RDMA, as svc_vc_create() does for TCP.
//
// `fd` is a TCP socket: bound, then it becomes a listener if it is none yet; or connected, then this one connection
// is served, as under inetd. It belongs to the transport. With RPC_ANYFD an IPv4 socket on a port of the system's
// choice is made. The transport's xp_netid is "rdma" or "rdma6"; svc_reg() with such a netconfig registers it with
// rpcbind. Buffer sizes have no meaning over RDMA.
//
// NULL on failure, and `fd` stays the caller's: clnt_spcreateerror() says why.
//
// # Safety
// `fd` is given up by the caller.
SVCXPRT *svc_rdma_create(int fd,
                         unsigned int sendsize,
                         unsigned int recvsize);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
