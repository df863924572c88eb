/* layout.c: the sizes and offsets of libtirpc's structures that the library relies on, as this machine's headers
 * have them. Compiling it is the test. */
#include <rpc/rpc.h>
#include <rpc/rpcb_clnt.h>
#include <rpc/rpc_msg.h>
#include <rpc/svc_mt.h>
#include <netconfig.h>
#include <stddef.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "size of " #type)
#define AT(type, field, bytes) _Static_assert(offsetof(type, field) == (bytes), "place of " #type "." #field)

#ifdef __LP64__
SIZE(CLIENT, 40);
AT(CLIENT, cl_auth, 0);
AT(CLIENT, cl_ops, 8);
AT(CLIENT, cl_private, 16);
AT(CLIENT, cl_netid, 24);
AT(CLIENT, cl_tp, 32);
SIZE(struct clnt_ops, 48);
AT(struct clnt_ops, cl_call, 0);
AT(struct clnt_ops, cl_abort, 8);
AT(struct clnt_ops, cl_geterr, 16);
AT(struct clnt_ops, cl_freeres, 24);
AT(struct clnt_ops, cl_destroy, 32);
AT(struct clnt_ops, cl_control, 40);

SIZE(SVCXPRT, 160);
AT(SVCXPRT, xp_fd, 0);
AT(SVCXPRT, xp_port, 4);
AT(SVCXPRT, xp_ops, 8);
AT(SVCXPRT, xp_addrlen, 16);
AT(SVCXPRT, xp_raddr, 20);
AT(SVCXPRT, xp_ops2, 48);
AT(SVCXPRT, xp_tp, 56);
AT(SVCXPRT, xp_netid, 64);
AT(SVCXPRT, xp_ltaddr, 72);
AT(SVCXPRT, xp_rtaddr, 88);
AT(SVCXPRT, xp_verf, 104);
AT(SVCXPRT, xp_p1, 128);
AT(SVCXPRT, xp_p2, 136);
AT(SVCXPRT, xp_p3, 144);
AT(SVCXPRT, xp_type, 152);
SIZE(struct xp_ops, 48);
AT(struct xp_ops, xp_recv, 0);
AT(struct xp_ops, xp_stat, 8);
AT(struct xp_ops, xp_getargs, 16);
AT(struct xp_ops, xp_reply, 24);
AT(struct xp_ops, xp_freeargs, 32);
AT(struct xp_ops, xp_destroy, 40);
SIZE(struct xp_ops2, 8);
SIZE(SVCXPRT_EXT, 24);
AT(SVCXPRT_EXT, flags, 0);
AT(SVCXPRT_EXT, xp_auth, 8);
SIZE(SVCAUTH, 16);

SIZE(XDR, 48);
AT(XDR, x_op, 0);
AT(XDR, x_ops, 8);
AT(XDR, x_public, 16);
AT(XDR, x_private, 24);
AT(XDR, x_base, 32);
AT(XDR, x_handy, 40);
SIZE(struct xdr_ops, 72);
AT(struct xdr_ops, x_getlong, 0);
AT(struct xdr_ops, x_putlong, 8);
AT(struct xdr_ops, x_getbytes, 16);
AT(struct xdr_ops, x_putbytes, 24);
AT(struct xdr_ops, x_getpostn, 32);
AT(struct xdr_ops, x_setpostn, 40);
AT(struct xdr_ops, x_inline, 48);
AT(struct xdr_ops, x_destroy, 56);
AT(struct xdr_ops, x_control, 64);

SIZE(AUTH, 72);
AT(AUTH, ah_cred, 0);
AT(AUTH, ah_verf, 24);
AT(AUTH, ah_ops, 56);
SIZE(struct opaque_auth, 24);
SIZE(struct rpc_err, 12);
AT(struct rpc_err, ru, 4);
SIZE(struct rpc_msg, 72);
AT(struct rpc_msg, rm_call, 8);
SIZE(struct call_body, 64);
SIZE(struct reply_body, 56);
SIZE(struct accepted_reply, 48);
SIZE(struct rejected_reply, 12);
SIZE(struct svc_req, 72);
SIZE(struct netconfig, 136);
AT(struct netconfig, nc_nlookups, 48);
AT(struct netconfig, nc_lookups, 56);
SIZE(struct netbuf, 16);
SIZE(struct t_bind, 24);
SIZE(RPCB, 32);
SIZE(rpcblist, 40);
#endif
