/* RPC over RDMA for programs that use libtirpc. Made by cbindgen from src/capi.rs: do not edit. */

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>
#include <rpc/rpc.h>

// clnt_control: sets the longest reply that later calls of a CLIENT make room for, in bytes of results.
// Takes a pointer to size_t, of at most 1 GiB. The default is the setting max_reply: 16 MiB, or over an adapter 256 KiB
// for a program with bindings.
#define CLSET_RDMA_MAXREPLY 0x52444d01

// clnt_control: gets the longest reply that calls of a CLIENT make room for, as a size_t. FALSE means that the
// CLIENT does not use RDMA.
#define CLGET_RDMA_MAXREPLY 0x52444d02

// clnt_control: sets how many calls on this connection may be outstanding at a time, up to what the peer grants;
// with a CLIENT of rpcrdma_clnt_reverse(), how many callbacks. Takes a pointer to unsigned, 1 to 4096. The
// defaults are the settings credits and reverse_credits. Over an adapter, the Receives that it has room for limit
// both directions together.
#define CLSET_RDMA_CREDITS 0x52444d03

// clnt_control: gets the number that CLSET_RDMA_CREDITS sets, as now in force.
#define CLGET_RDMA_CREDITS 0x52444d04

// clnt_control: sets how many callbacks this connection grants to its server, once a program is served. Takes a
// pointer to unsigned, 1 to 4096. The default is the setting reverse_credits.
#define CLSET_RDMA_REVERSE_CREDITS 0x52444d05

// clnt_control: gets the number that CLSET_RDMA_REVERSE_CREDITS sets, as now in force: 1 before a program is served.
#define CLGET_RDMA_REVERSE_CREDITS 0x52444d06

// clnt_control: sets whether callbacks over this connection that do not fit in one Send may use chunks.
// Takes a pointer to bool_t. The default is the setting reverse_chunks. Without chunks, longer callbacks fail at
// the caller, and the end that serves callbacks answers any that has chunks with ERR_CHUNK (RFC 8167 section 5.3).
#define CLSET_RDMA_REVERSE_CHUNKS 0x52444d07

// clnt_control: gets how many times the connection of this CLIENT has been established, as an unsigned. When the
// number has grown, the server's program no longer knows its client: register with it again.
#define CLGET_RDMA_CONNECTIONS 0x52444d08

// clnt_control: makes our own Receives longer, and tells the peer; see rpcrdma_clnt_peer(). Takes a pointer to
// unsigned, in bytes: at least what the peer was told before, at most the setting max_inline. Fails in Version One.
#define CLSET_RDMA_RECEIVE_SIZE 0x52444d09

// clnt_control: gets the size that the peer believes our Receives to have, as an unsigned.
#define CLGET_RDMA_RECEIVE_SIZE 0x52444d0a

// SVC_CONTROL: sets how many calls an accepted connection grants to its client. Takes a pointer to unsigned, 1 to
// 4096. The default is the setting credits.
#define SVCSET_RDMA_CREDITS 0x52444d11

// SVC_CONTROL: gets the number that SVCSET_RDMA_CREDITS sets, as now in force.
#define SVCGET_RDMA_CREDITS 0x52444d12

// The peer has not said whether it takes callbacks.
#define RPCRDMA_BACKWARD_UNKNOWN 0

// The peer takes no callbacks.
#define RPCRDMA_BACKWARD_NONE 1

// The peer takes callbacks, or replies to its own, if they fit in one Send.
#define RPCRDMA_BACKWARD_SIZE_LIMITED 2

// The peer takes callbacks, or replies to its own, of any length.
#define RPCRDMA_BACKWARD_GENERAL 3

// A characteristic: the minimum size of each Receive, in bytes.
#define RPCRDMA_RECEIVE_SIZE 1

// A characteristic: whether replies may invalidate memory of the requester, 0 or 1.
#define RPCRDMA_REMOTE_INVALIDATION 2

// A characteristic: what the peer takes in the reverse direction, RPCRDMA_BACKWARD_UNKNOWN and so on.
#define RPCRDMA_BACKWARD 3

// The peer now has the value asked for.
#define RPCRDMA_DONE 1

// The peer has refused.
#define RPCRDMA_REJECTED 0

// The timeout has expired. The request stands: the peer may still answer it.
#define RPCRDMA_PENDING 2

// A walk over the arguments or the results of one message; see rpcrdma_binding_register().
struct rpcrdma_walk;

// What this process has done since it began; see rpcrdma_stats_get(). The counters only ever grow.
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
  // Registrations of memory with a device, for a handle given to a peer or for a request of our own.
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
  // Connections re-established for a CLIENT that had lost its connection.
  uint64_t reconnects;
  // Clients that fell back from rdma to tcp.
  uint64_t fallbacks;
  // Calls that timed out with their credit still out.
  uint64_t orphans;
  // Chains of requests that were handed to an adapter, each with one doorbell.
  uint64_t doorbells;
  // Memory windows bound, in such a chain: handles for memory that is already registered.
  uint64_t binds;
};

// A dispatch routine, as for svc_register().
typedef void (*rpcrdma_dispatch)(struct svc_req *request, SVCXPRT *xprt);

// What is known of the other end of a connection; see rpcrdma_clnt_peer().
struct rpcrdma_peer {
  // The version of RPC-over-RDMA: 1 or 2; 0 before one is agreed.
  uint32_t version;
  // Whether the peer supports the transport characteristics: 1 no, 2 yes, 0 not known yet.
  uint32_t extension;
  // The most bytes that one Send to the peer may have, header included.
  uint32_t receive_size;
  // Whether replies to the peer may invalidate its memory.
  uint32_t remote_invalidation;
  // What the peer takes in the reverse direction: RPCRDMA_BACKWARD_UNKNOWN and so on.
  uint32_t backward;
  // How many times the peer has announced characteristics on this connection.
  uint32_t updates;
  // The most bytes that one Send from the peer may have, as far as the peer knows.
  uint32_t own_receive_size;
};

// The routine that rpcrdma_clnt_on_update() registers.
typedef void (*rpcrdma_told)(CLIENT *clnt, const struct rpcrdma_peer *peer, void *closure);

// Walks the arguments or the results of a procedure, in wire order; `closure` is the binding's. Returns FALSE if a
// step returned FALSE.
typedef bool_t (*rpcrdma_walker)(struct rpcrdma_walk *walk, void *closure);

// Which items of a procedure may travel in chunks of their own, directly between the memory of the two programs.
struct rpcrdma_binding {
  // sizeof (struct rpcrdma_binding).
  size_t size;
  // Program number.
  rpcprog_t program;
  // Version number.
  rpcvers_t version;
  // Procedure number.
  uint32_t procedure;
  // Walks the arguments. NULL: nothing in them is eligible, and nothing is known about the reply's length.
  rpcrdma_walker arguments;
  // Walks the results of a successful reply. NULL: nothing in them is eligible.
  rpcrdma_walker results;
  // Passed to both walkers.
  void *closure;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the loaded library, such as "0.1.0". The string is static.
const char *rpcrdma_version(void);

// Copies the counters of this process to *stats. `size` is sizeof *stats as the program was compiled, so that the
// program and the library need not be of the same age: counters that the library does not have become 0.
// FALSE, and *stats untouched, for NULL or a size that is not a multiple of a counter's.
//
// `stats` is NULL or has room for `size` bytes.
bool_t rpcrdma_stats_get(struct rpcrdma_stats *stats,
                         size_t size);

// Creates a CLIENT for a program at the RDMA listener `raddr`, as clnt_vc_create() does for TCP. It uses RDMA or
// fails.
//
// `fd` is a TCP socket, connected or not, on which nothing has been sent. It remains the caller's unless
// clnt_control(CLSET_FD_CLOSE) gives it to the CLIENT. With RPC_ANYFD a socket is created, which belongs to the CLIENT.
// `raddr` may be NULL if `fd` is connected. CLIENTs created on one socket share its connection. The buffer sizes have
// no meaning over RDMA, and any value is accepted.
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

// Creates a transport that serves RDMA, as svc_vc_create() does for TCP.
//
// `fd` is a TCP socket. A bound one becomes a listener if it is not one yet; of a connected one, only that connection
// is served, as under inetd. The socket belongs to the transport. With RPC_ANYFD an IPv4 socket is created on a port
// chosen by the system. The transport's xp_netid is "rdma" or "rdma6"; svc_reg() with the netconfig of that netid
// registers the service with rpcbind. The buffer sizes have no meaning over RDMA.
//
// NULL on failure, and `fd` remains the caller's: clnt_spcreateerror() says why.
//
// Unless it fails, the caller gives up `fd`.
SVCXPRT *svc_rdma_create(int fd,
                         unsigned int sendsize,
                         unsigned int recvsize);

// Creates a CLIENT for callbacks to the client of an accepted connection; `xprt` is the transport that its requests
// come with. The client's program must have said that it serves `prog`: calling one that does not may cost the
// connection (RFC 8167 section 6). In Version Two a client says whether it takes callbacks, and a callback to one that
// does not fails at once.
//
// clnt_call() and the rest work as with any CLIENT, with AUTHs of any flavour. Calls may be made inside a dispatch
// routine, between requests, and from other threads. While a call waits in the thread of the service loop, that
// thread dispatches further requests of the same connection, because the client may have to make a call before it can
// answer: dispatch routines that make callbacks must be ready to be entered again.
//
// The CLIENT outlives the connection. A call that is outstanding when the connection breaks ends with RPC_CANTRECV.
// From then until rpcrdma_clnt_rebind(), calls fail with RPC_CANTSEND in the thread of the service loop, and wait in
// other threads, up to their timeout.
//
// The longest reply is what fits in one Send; CLSET_RDMA_MAXREPLY makes room for more, with a Reply chunk, which Linux
// peers cannot handle. NULL on failure: clnt_pcreateerror() prints why.
//
// `xprt` is NULL or a live transport.
CLIENT *rpcrdma_clnt_reverse(SVCXPRT *xprt,
                             rpcprog_t prog,
                             rpcvers_t vers);

// Moves a CLIENT of rpcrdma_clnt_reverse() to another accepted connection: the one over which its client has come
// back, which only the program's own protocol can tell. Calls that wait for the client then proceed.
//
// FALSE on failure: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `xprt` is NULL or a live transport.
bool_t rpcrdma_clnt_rebind(CLIENT *clnt,
                           SVCXPRT *xprt);

// Serves a program to the server of this CLIENT's connection: the server's callbacks are passed to `dispatch`, as
// svc_run() does in a server, and svc_getargs(), svc_sendreply() and the rest work as they do there. Call it before
// telling the server that it may call back. A NULL `dispatch` ends the service: this function then waits until the
// routine no longer runs, unless it is called inside a routine.
//
// Callbacks are served by any thread that waits for a reply on the connection, by rpcrdma_clnt_poll(), and by
// svc_run() (or the program's own loop over svc_pollfd) if this process, not a child of it, runs one. They are served
// one at a time, but a callback that itself makes calls on the connection serves others while it waits. While a call
// with RPCSEC_GSS waits, a callback cannot make another such call on the same connection. clnt_destroy() waits for a
// callback that another thread serves on its connection. Inside a routine it waits for nothing: what is still under
// way with the CLIENT goes on, and the last of it to end frees the CLIENT.
//
// From now on the connection is kept up: when it is lost, whichever of these three serves next makes it anew.
// CLGET_RDMA_CONNECTIONS shows that. The first call over a new connection is to procedure 0 of the CLIENT's program.
// CLIENTs on one socket share the programs that are served.
//
// FALSE on failure: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `dispatch` stays valid as long as the program is served.
bool_t rpcrdma_clnt_serve(CLIENT *clnt,
                          rpcprog_t prog,
                          rpcvers_t vers,
                          rpcrdma_dispatch dispatch);

// Waits for callbacks, for at most `timeout`, and serves those that have arrived. Returns how many it served: 0 if
// none came, or as soon as a lost connection has been made anew (see CLGET_RDMA_CONNECTIONS). -1 if no program is
// served, or if the connection was lost and could not be made anew in time: clnt_perror() prints why. Signal handlers
// run during the wait, and do not end it.
//
// `clnt` is NULL or a live CLIENT.
int rpcrdma_clnt_poll(CLIENT *clnt,
                      struct timeval timeout);

// Serves as svc_run() does, with `threads` threads: the calling one, and others created for it. Requests of all transports
// are served concurrently, including those of one connection over RDMA, up to its credits. Each request over RDMA has an
// SVCXPRT of its own, which is valid until its routine returns or, if the routine does not reply, until the reply; the
// latest 64 unanswered requests of a connection can be replied to in this way. Requests with RPCSEC_GSS are served one at
// a time on each connection, and so are requests of each of libtirpc's own transports. Dispatch routines must lock what they
// share; rpcgen's code must be made with -M, so that it does not return results in static memory.
//
// Returns TRUE after svc_exit(), when all routines have returned. FALSE if it cannot begin: clnt_pcreateerror() prints why.
bool_t rpcrdma_svc_run(unsigned int threads);

// Copies to *peer what is known about the server of this CLIENT, or about the client that a CLIENT of
// rpcrdma_clnt_reverse() calls back. Looks at what has arrived, but does not wait. `size` is sizeof *peer
// as the program was compiled, as with rpcrdma_stats_get().
//
// In Version One the numbers are those that were agreed when the connection was made, and `backward` is not
// known. Before a version is agreed, almost nothing is known; creating the CLIENT waits for that, unless the
// server is slow.
//
// FALSE, and *peer untouched, for NULL, an invalid size, or a connection that is lost: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT; `peer` is NULL or has room for `size` bytes.
bool_t rpcrdma_clnt_peer(CLIENT *clnt,
                         struct rpcrdma_peer *peer,
                         size_t size);

// Copies to *peer what is known about the client of an accepted connection; `xprt` is the transport that its requests
// come with. `size` is as with rpcrdma_clnt_peer(). FALSE, and *peer untouched, where that function fails, and for any other
// SVCXPRT.
//
// `xprt` is NULL or a live transport; `peer` is NULL or has room for `size` bytes.
bool_t rpcrdma_svc_peer(SVCXPRT *xprt,
                        struct rpcrdma_peer *peer,
                        size_t size);

// Asks the peer to set the characteristic `which` (RPCRDMA_RECEIVE_SIZE and so on) to `value`. Waits for the outcome,
// for at most `timeout`, and returns it: RPCRDMA_DONE, RPCRDMA_REJECTED, or RPCRDMA_PENDING when the timeout has
// expired. The peer may still comply then: rpcrdma_clnt_peer() shows whether it has, and repeating the request resumes
// the wait. A connection has one request outstanding at a time.
//
// -1 if the connection speaks Version One or is lost, if an earlier request is not settled, if the peer does not support
// the extension, or if there is no such characteristic or value: clnt_perror() prints why.
//
// `clnt` is NULL or a live CLIENT.
int rpcrdma_clnt_request(CLIENT *clnt,
                         uint32_t which,
                         uint32_t value,
                         struct timeval timeout);

// Has `told` called when the peer has announced characteristics since the last time, or since this function was
// called. `told` runs in the thread in which a clnt_call(), rpcrdma_clnt_poll() or rpcrdma_clnt_request() with this
// CLIENT ends, just before that returns. It may make calls, but must not destroy the CLIENT. A NULL `told` ends this.
//
// FALSE for a CLIENT of another transport.
//
// `clnt` is NULL or a live CLIENT; `told` and `closure` stay valid until this function or clnt_destroy() is called next.
bool_t rpcrdma_clnt_on_update(CLIENT *clnt,
                              rpcrdma_told told,
                              void *closure);

// Registers memory of the program: what an RPC encodes from it is sent from where it lies, without being copied
// first.
//
// Whatever an xdrproc encodes from registered memory must stay valid and unchanged until clnt_call() or
// svc_sendreply() returns, so it must be nothing that the xdrproc itself frees or reuses. Results that lie in
// registered memory are received in place too: see rpcrdma_binding_register(). The memory still belongs to the
// program; unregister it before it is freed.
//
// FALSE for NULL, a length of 0, or memory that overlaps what is registered already.
bool_t rpcrdma_mem_register(const void *address,
                            size_t length);

// Ends a registration; `address` is where it begins. Outstanding calls are not affected. FALSE if there is no such
// registration.
bool_t rpcrdma_mem_unregister(const void *address);

// Gets the argument of the request being dispatched that came in a Read chunk of its own, where it lies in
// memory of this library. A dispatch routine that sets the pointer of its counted opaque to *address before
// svc_getargs() gets the argument without a copy. It may only be read, and only until the reply is sent; the pointer
// must be NULL again before svc_freeargs(), which would free it.
//
// FALSE if there is none: the request is short, came in another way, or not over RDMA. svc_getargs() then allocates
// memory, as usual.
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
// nothing but the message and `closure`, must make no RPC calls, and may run in any thread. It also runs on messages
// from peers.
//
// A client that puts its own buffer into its results beforehand (everything zeroed except data_val, which points to
// the buffer, and data_len, which is the buffer's size) gets the result there without a copy.
//
// Both ends should have the same binding; where only one has it, calls work without it. FALSE, and
// clnt_spcreateerror() says why, for a procedure that has a binding already, for NULL, an invalid size, or settings that
// cannot be read.
//
// `binding` is NULL or points to a binding; its functions and its closure stay valid for the life of the process.
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

// While walking arguments: the results may hold an eligible opaque of at most `most` bytes. Call it for each such
// opaque, in order. rpcrdma_walk_reply() need not count them.
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_result(struct rpcrdma_walk *walk,
                           size_t most);

// While walking arguments: the results have at most `bytes` more bytes. If it is never called, their length is not
// known, and calls make room for the CLIENT's maximum reply.
//
// As rpcrdma_walk_skip().
bool_t rpcrdma_walk_reply(struct rpcrdma_walk *walk,
                          size_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
