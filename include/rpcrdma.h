/* RPC over RDMA for programs that use libtirpc. Made by cbindgen from src/capi.rs: do not edit. */

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>
#include <rpc/rpc.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that is loaded, such as "0.1.0". It is never freed.
const char *rpcrdma_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
