/* RPC over RDMA for programs that use libtirpc. Made by cbindgen from src/capi.rs: do not edit. */

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>
#include <rpc/rpc.h>

// clnt_control: sets the longest reply that later calls of a CLIENT make room for, in bytes of results.
// Takes a pointer to size_t, of at most 1 GiB. The default is the setting max_reply: 16 MiB, over an adapter 256 KiB
// for a program with bindings.
#define CLSET_RDMA_MAXREPLY 0x52444d01

// clnt_control: gets the longest reply that calls of a CLIENT make room for, as a size_t. FALSE says that the
// CLIENT does not go over RDMA.
#define CLGET_RDMA_MAXREPLY 0x52444d02

// clnt_control: sets how many calls of this connection may be under way at a time, as far as the peer grants it;
// with the CLIENT of rpcrdma_clnt_reverse(), how many calls back. Takes a pointer to unsigned, 1 to 4096. The
// defaults are the settings credits and reverse_credits. What an adapter has Receives for bounds it, both
// directions together.
#define CLSET_RDMA_CREDITS 0x52444d03

// clnt_control: gets what CLSET_RDMA_CREDITS sets, as it is in force.
#define CLGET_RDMA_CREDITS 0x52444d04

// clnt_control: sets how many calls back this connection grants to its server, once a program is served. Takes a
// pointer to unsigned, 1 to 4096. The default is the setting reverse_credits.
#define CLSET_RDMA_REVERSE_CREDITS 0x52444d05

// clnt_control: gets what CLSET_RDMA_REVERSE_CREDITS sets, as it is in force: 1 before a program is served.
#define CLGET_RDMA_REVERSE_CREDITS 0x52444d06

// clnt_control: sets whether calls back over this connection may have chunks: those that do not fit one Send.
// Takes a pointer to bool_t. The default is the setting reverse_chunks. Without them, longer calls back fail at
// the caller, and the serving end answers those with chunks with ERR_CHUNK (RFC 8167 section 5.3).
#define CLSET_RDMA_REVERSE_CHUNKS 0x52444d07

// clnt_control: gets how often the connection of this CLIENT was made, as an unsigned. When it has grown, the
// server's program does not know its client any more: register with it again.
#define CLGET_RDMA_CONNECTIONS 0x52444d08

// clnt_control: makes our own Receives longer, and tells the peer; see rpcrdma_clnt_peer(). Takes a pointer to
// unsigned, in bytes: at least what was told before, at most the setting max_inline. In Version One it fails.
#define CLSET_RDMA_RECEIVE_SIZE 0x52444d09

// clnt_control: gets how long the peer takes our Receives to be, as an unsigned.
#define CLGET_RDMA_RECEIVE_SIZE 0x52444d0a

// SVC_CONTROL: sets how many calls an accepted connection grants to its client. Takes a pointer to unsigned, 1 to
// 4096. The default is the setting credits.
#define SVCSET_RDMA_CREDITS 0x52444d11

// SVC_CONTROL: gets what SVCSET_RDMA_CREDITS sets, as it is in force.
#define SVCGET_RDMA_CREDITS 0x52444d12

// The peer has not told whether it takes calls back.
#define RPCRDMA_BACKWARD_UNKNOWN 0

// The peer takes no calls back.
#define RPCRDMA_BACKWARD_NONE 1

// The peer takes calls back, or replies to its own, if they fit one Send.
#define RPCRDMA_BACKWARD_SIZE_LIMITED 2

// The peer takes calls back, or replies to its own, of any length.
#define RPCRDMA_BACKWARD_GENERAL 3

// A characteristic: fewest bytes of each Receive.
#define RPCRDMA_RECEIVE_SIZE 1

// A characteristic: whether replies may invalidate memory of their caller, 0 or 1.
#define RPCRDMA_REMOTE_INVALIDATION 2

// A characteristic: what is taken in the reverse direction, one of RPCRDMA_BACKWARD_UNKNOWN and so on.
#define RPCRDMA_BACKWARD 3

// The peer is as it was asked to be.
#define RPCRDMA_DONE 1

// The peer has refused.
#define RPCRDMA_REJECTED 0

// The time is over. The request stands: the peer may answer it yet.
#define RPCRDMA_PENDING 2

// A walk over the arguments or the results of one message; see rpcrdma_binding_register().
struct rpcrdma_walk;

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
  // Memory that a device had to register: for a handle that a peer got, or for a request of our own.
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
  // Chains of requests that were handed to an adapter, each with one doorbell.
  uint64_t doorbells;
  // Memory windows bound, in such a chain: handles for memory that is registered already.
  uint64_t binds;
};

// A dispatch routine, as for svc_register().
typedef void (*rpcrdma_dispatch)(struct svc_req *request, SVCXPRT *xprt);

// What is known of the other end of a connection; see rpcrdma_clnt_peer().
struct rpcrdma_peer {
  // The version of RPC-over-RDMA: 1 or 2; 0 before it is agreed.
  uint32_t version;
  // Whether the peer knows the transport characteristics: 1 no, 2 yes, 0 not known yet.
  uint32_t extension;
  // Bytes that one Send to it may have, header included.
  uint32_t receive_size;
  // Whether replies to it may invalidate its memory.
  uint32_t remote_invalidation;
  // RPCRDMA_BACKWARD_UNKNOWN and so on: what it takes in the reverse direction.
  uint32_t backward;
  // How often it has said something of itself on this connection.
  uint32_t updates;
  // Bytes that one Send of the peer may have, as far as it knows.
  uint32_t own_receive_size;
};

// What rpcrdma_clnt_on_update() has called.
typedef void (*rpcrdma_told)(CLIENT *clnt, const struct rpcrdma_peer *peer, void *closure);

// Walks the arguments or the results of a procedure, in the order of the wire; `closure` is the binding's. Returns
// FALSE when a step returned FALSE.
typedef bool_t (*rpcrdma_walker)(struct rpcrdma_walk *walk, void *closure);

// Which items of a procedure may travel in chunks of their own, between the memories of the two programs.
struct rpcrdma_binding {
  // sizeof (struct rpcrdma_binding).
  size_t size;
  // Program number.
  rpcprog_t program;
  // Version number.
  rpcvers_t version;
  // Procedure number.
  uint32_t procedure;
  // Walks the arguments. NULL: nothing in them is eligible, and nothing is known of the reply's length.
  rpcrdma_walker arguments;
  // Walks the results of a successful reply. NULL: nothing in them is eligible.
  rpcrdma_walker results;
  // Given to both.
  void *closure;
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
// `stats` is NULL or has room for `size` bytes.
bool_t rpcrdma_stats_get(struct rpcrdma_stats *stats,
                         size_t size);

// Makes a CLIENT for a program at the RDMA listener `raddr`, as clnt_vc_create() does for TCP: RDMA or an error.
//
// `fd` is a TCP socket, connected or not, on which nothing has been sent; it stays the caller's unless
// clnt_control(CLSET_FD_CLOSE) gives it away. With RPC_ANYFD the socket is made here and belongs to the CLIENT.
// `raddr` may be NULL if `fd` is connected. CLIENTs made on one socket share its connection. Buffer sizes have no
// meaning over RDMA and are accepted as they are.
//
// NULL on failure: clnt_pcreateerror() prints why.
//
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
// `fd` is given up by the caller.
SVCXPRT *svc_rdma_create(int fd,
                         unsigned int sendsize,
                         unsigned int recvsize);

// Makes a CLIENT for calls back to the client of an accepted connection: `xprt` is what its requests come with. The
// client's program must have said that it serves `prog`: one that does not may lose the connection by the call
// (RFC 8167 section 6). In Version Two a client tells whether it takes calls back, and a call to one that does not
// fails at once.
//
// clnt_call() and all else are as for any CLIENT, with AUTHs of any flavour. Calls may be made inside a dispatch
// routine, between requests, and from other threads. While a call waits in the thread of the service loop,
// further requests of the same connection are dispatched in its midst, as a callback may call forward before it
// answers: dispatch routines that make calls back must be ready for that.
//
// The CLIENT outlives the connection. A call that was under way ends with RPC_CANTRECV when the connection
// breaks. After that calls fail with RPC_CANTSEND in the thread of the service loop, and wait up to their timeout
// in other threads: until rpcrdma_clnt_rebind().
//
// The longest reply is what fits one Send; CLSET_RDMA_MAXREPLY makes room for more, by a Reply chunk, which Linux
// peers cannot handle. NULL on failure: clnt_pcreateerror() prints why.
//
// `xprt` is NULL or a live transport.
CLIENT *rpcrdma_clnt_reverse(SVCXPRT *xprt,
                             rpcprog_t prog,
                             rpcvers_t vers);

// Has a CLIENT of rpcrdma_clnt_reverse() go on over another accepted connection: on that one its client has come
// back, which only the program's own protocol can tell. Calls that wait for it go through.
//
// FALSE on failure: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `xprt` is NULL or a live transport.
bool_t rpcrdma_clnt_rebind(CLIENT *clnt,
                           SVCXPRT *xprt);

// Serves a program to the server of this CLIENT's connection: what the server calls back is given to `dispatch`,
// as svc_run() does in a server; svc_getargs(), svc_sendreply() and the rest are as there. Call it before telling
// the server that it may call back. `dispatch` NULL ends it: the routine does not run any more when this returns, for
// which it waits, unless it is called inside a routine.
//
// Callbacks are served by any thread that waits for a reply on the connection, by rpcrdma_clnt_poll(), and by
// svc_run() (or the program's own loop over svc_pollfd) if this process, not a child of it, has one. One at a
// time; a callback that makes calls on the connection itself serves others while it waits; while a call with
// RPCSEC_GSS waits, it makes no such call on the same connection. clnt_destroy() waits for a callback that another
// thread serves on its connection; but inside a routine it waits for nothing, and what is still under way with the
// CLIENT goes on, and takes it along when it ends.
//
// The connection is kept from now on: when it is lost, the next of these three makes it anew.
// CLGET_RDMA_CONNECTIONS tells. A call of procedure 0 of the CLIENT's program goes first over a new connection.
// CLIENTs on one socket share their programs.
//
// FALSE on failure: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `dispatch` is good as long as it is served.
bool_t rpcrdma_clnt_serve(CLIENT *clnt,
                          rpcprog_t prog,
                          rpcvers_t vers,
                          rpcrdma_dispatch dispatch);

// Waits for callbacks at most so long, and serves those that are there. Returns how many; 0 if none came, and as
// soon as a lost connection was made anew: look at CLGET_RDMA_CONNECTIONS. -1 if no program is served, or the
// connection was lost and could not be made anew in time: clnt_perror() prints why. Signal handlers run
// meanwhile, and do not end it.
//
// `clnt` is NULL or a live CLIENT.
int rpcrdma_clnt_poll(CLIENT *clnt,
                      struct timeval timeout);

// Serves as svc_run() does, with so many threads: the calling one, and others that are made for it. Requests of all transports
// are served beside each other, also those of one connection over RDMA, up to its credits; each of these has an SVCXPRT
// of its own, which is good until its routine returns, or, if that does not reply, until the reply: to the latest 64 of a
// connection. Requests with RPCSEC_GSS are served one at a time on each connection, and so are those of libtirpc's own transports.
// What the routines share they lock; the code that rpcgen makes does not return results in static memory with its option -M.
//
// Returns after svc_exit(), when all routines have returned: TRUE. FALSE if it cannot begin: clnt_pcreateerror() prints why.
bool_t rpcrdma_svc_run(unsigned int threads);

// Copies to *peer what is known of the server of this CLIENT, or of the client that a CLIENT of
// rpcrdma_clnt_reverse() calls back. What has arrived is looked at; nothing is waited for. `size` is sizeof *peer
// as the program was compiled, as with rpcrdma_stats_get().
//
// In Version One the numbers are those that were agreed when the connection was made, and `backward` is not
// known. Before a version is agreed, which making the CLIENT waits for if the server is not slow, next to nothing
// is.
//
// FALSE, and *peer untouched, for NULL, an invalid size, or a connection that is lost: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `peer` is NULL or has room for `size` bytes.
bool_t rpcrdma_clnt_peer(CLIENT *clnt,
                         struct rpcrdma_peer *peer,
                         size_t size);

// Copies to *peer what is known of the client of an accepted connection: `xprt` is what its requests come with.
// Otherwise as rpcrdma_clnt_peer(). FALSE, and *peer untouched, for any other SVCXPRT too.
//
// `xprt` is NULL or a live transport; `peer` is NULL or has room for `size` bytes.
bool_t rpcrdma_svc_peer(SVCXPRT *xprt,
                        struct rpcrdma_peer *peer,
                        size_t size);

// Asks the peer to have the value `value` of the characteristic `which`: RPCRDMA_RECEIVE_SIZE and so on. Waits
// for the outcome at most so long: RPCRDMA_DONE, RPCRDMA_REJECTED, or RPCRDMA_PENDING when the time is over. The
// peer may still do it then: rpcrdma_clnt_peer() tells, and the same request once more goes on waiting. One
// request of a connection is under way at a time.
//
// -1 if the connection speaks Version One or is lost, for an earlier request that is not settled, and for values
// that there are not: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT.
int rpcrdma_clnt_request(CLIENT *clnt,
                         uint32_t which,
                         uint32_t value,
                         struct timeval timeout);

// Has `told` called when the peer has said something of itself since the last time, or since this call: in the
// thread in which a clnt_call(), rpcrdma_clnt_poll() or rpcrdma_clnt_request() with this CLIENT ends, just before
// that returns. It may make calls, but must not destroy the CLIENT. NULL ends it.
//
// FALSE for a CLIENT of another transport.
//
// `clnt` is NULL or a live CLIENT; `told` and `closure` are good until another call of this or clnt_destroy().
bool_t rpcrdma_clnt_on_update(CLIENT *clnt,
                              rpcrdma_told told,
                              void *closure);

// Registers memory of the program's: what an RPC encodes from there is sent from where it lies, and not copied
// first.
//
// Whatever an xdrproc puts from registered memory must stay valid and unchanged until clnt_call() or
// svc_sendreply() returns, so nothing that the xdrproc frees or reuses itself. Results too are received in place
// if they lie there: see rpcrdma_binding_register(). The memory stays the program's; unregister it before it is
// freed.
//
// FALSE for NULL, no bytes, or memory that overlaps what is registered already.
bool_t rpcrdma_mem_register(const void *address,
                            size_t length);

// Ends a registration; `address` is where it begins. Calls that are under way are not disturbed. FALSE when there is
// none.
bool_t rpcrdma_mem_unregister(const void *address);

// The argument of the request that is being dispatched which came in a Read chunk of its own, as it lies in
// memory of this library. A dispatch routine that sets the pointer of its counted opaque to *address before
// svc_getargs() gets the argument without a copy. It is to be read only, until the reply is sent; the pointer
// must be NULL again before svc_freeargs(), which would free it.
//
// FALSE when there is none: the request is short, came in another way, or not over RDMA. svc_getargs() allocates
// then, as usual.
//
// `xprt` is a live transport; `address` and `length` are writable.
bool_t rpcrdma_svc_placed(SVCXPRT *xprt,
                          void **address,
                          size_t *length);

// Registers the binding of one procedure for this process, as client and as server (RFC 8166 section 6).
//
// A walker goes through the encoded message with the rpcrdma_walk_ functions and marks the counted opaques that are
// eligible with rpcrdma_walk_item(). While walking arguments it also says how large eligible results may be, with
// rpcrdma_walk_result(), and how long the rest of the results may be, with rpcrdma_walk_reply(). It must depend on
// nothing but the message and `closure`, make no calls, and may run in any thread. It runs on messages of peers too.
//
// A client that puts its own buffer into its results beforehand (everything zeroed but data_val, and data_len the
// size of the buffer) gets the result there without a copy.
//
// Both ends should have the same binding; where only one has it, calls go on without. FALSE, and
// clnt_spcreateerror() says why, for a procedure that has a binding already.
//
// `binding` is NULL or points to a binding; its functions and its closure are good for the life of the process.
bool_t rpcrdma_binding_register(const struct rpcrdma_binding *binding);

// Walks over one word (int, unsigned, bool, enum). `value` may be NULL.
//
// `walk` is NULL or what a walker was given, while it runs; `value` is NULL or writable.
bool_t rpcrdma_walk_word(struct rpcrdma_walk *walk, uint32_t *value);

// Walks over a hyper. `value` may be NULL.
//
// As rpcrdma_walk_word().
bool_t rpcrdma_walk_hyper(struct rpcrdma_walk *walk, uint64_t *value);

// Walks over a fixed opaque of `bytes` bytes and its pad.
//
// `walk` is NULL or what a walker was given, while it runs.
bool_t rpcrdma_walk_skip(struct rpcrdma_walk *walk, size_t bytes);

// Walks over a counted opaque or a string that is not eligible.
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_opaque(struct rpcrdma_walk *walk);

// Walks over a counted opaque or a string that is eligible.
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_item(struct rpcrdma_walk *walk);

// While walking arguments: the results may hold an eligible opaque of at most `most` bytes. Call it for each of
// them, in their order. They need not be counted by rpcrdma_walk_reply().
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_result(struct rpcrdma_walk *walk,
                           size_t most);

// While walking arguments: the results have at most `bytes` bytes more. Without any such word their length is not
// known, and calls make room for the CLIENT's maximum reply.
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_reply(struct rpcrdma_walk *walk,
                          size_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
