/* gss.c: RPCSEC_GSS with Kerberos 5 against a real KDC (kdc.sh). */
#include "harness.h"
#ifdef WITH_GSS
#include <errno.h>
#include <pthread.h>
#include <rpc/auth_gss.h>
#include <rpc/rpcsec_gss.h>
#include <semaphore.h>
#include <stdarg.h>

static char service_name[] = "suite@localhost", mechanism[] = "kerberos_v5";

static CLIENT *secured(struct server *server, rpc_gss_service_t service)
{
    CLIENT *client = client_of(server);
    rpc_gss_options_ret_t details;
    AUTH *auth = rpc_gss_seccreate(client, service_name, mechanism, service, NULL, NULL, &details);
    if (auth == NULL) {
        rpc_gss_error_t error;
        rpc_gss_get_error(&error);
        fprintf(stderr, "rpc_gss_seccreate: %d, system %d, major %x, minor %d\n", error.rpc_gss_error,
                error.system_error, (unsigned)details.major_status, details.minor_status);
    }
    REQUIRE(auth != NULL);
    client->cl_auth = auth;
    return client;
}

static void require_principal(CLIENT *client, rpc_gss_service_t service)
{
    suite_identity who = {0};
    REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
    REQUIRE(who.flavor == RPCSEC_GSS);
    REQUIRE(who.service == (int)service);
}

static void release(CLIENT *client)
{
    auth_destroy(client->cl_auth);
    client->cl_auth = authnone_create();
    require_echo(client, 100, 9);
    clnt_destroy(client);
}

static void gss_small(long service)
{
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    CLIENT *client = secured(&server, (rpc_gss_service_t)service);
    require_principal(client, (rpc_gss_service_t)service);
    for (unsigned i = 0; i < 10; i++)
        require_echo(client, 1 + i * 1000, i);
    AUTH *gss = client->cl_auth;
    client->cl_auth = authnone_create();
    require_echo(client, 5000, 1);
    client->cl_auth = gss;
    require_echo(client, 5000, 2);
    release(client);
}

static void gss_large(long service)
{
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    CLIENT *client = secured(&server, (rpc_gss_service_t)service);
    for (unsigned i = 0; i < 4; i++) {
        require_echo(client, 100001, i);
        require_echo(client, 10, i);
    }
    require_principal(client, (rpc_gss_service_t)service);
    release(client);
}

static void gss_authgss_create_default(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    CLIENT *client = client_of(&server);
    struct rpc_gss_sec sec = {
        .mech = (gss_OID) & (gss_OID_desc){9, (void *)"\x2a\x86\x48\x86\xf7\x12\x01\x02\x02"},
        .svc = RPCSEC_GSS_SVC_INTEGRITY,
    };
    client->cl_auth = authgss_create_default(client, service_name, &sec);
    REQUIRE(client->cl_auth != NULL);
    require_principal(client, rpcsec_gss_svc_integrity);
    require_echo(client, 5000, 1);
    release(client);
}

/* One context after the other: what the server remembers of an old transport must not spoil a new one. */
static void gss_connection_after_connection(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    for (unsigned i = 0; i < 10; i++) {
        CLIENT *client = secured(&server, rpcsec_gss_svc_integrity);
        require_echo(client, 2000, i);
        auth_destroy(client->cl_auth);
        client->cl_auth = authnone_create();
        clnt_destroy(client);
    }
}

static CLIENT *threads_client;
static void *echo_some(void *number)
{
    for (unsigned i = 0; i < 20; i++)
        require_echo(threads_client, 3000, *(unsigned *)number + i);
    return NULL;
}

static void gss_four_threads_on_one_client(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    threads_client = secured(&server, rpcsec_gss_svc_integrity);
    pthread_t threads[4];
    unsigned numbers[4] = {0, 100, 200, 300};
    for (int i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, echo_some, &numbers[i]) == 0);
    for (int i = 0; i < 4; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    release(threads_client);
}

static void *block_one(void *client)
{
    u_int argument = 5, result = 0;
    REQUIRE_STATUS(suite_block_2(&argument, &result, client), RPC_SUCCESS);
    return NULL;
}

/* A context has one call under way at a time. A call that waits for it ends within its own time, and no other context waits. */
static void gss_call_behind_a_busy_context(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    struct server other = server_start("-c", "tli", "-g", service_name, NULL);
    CLIENT *client = secured(&server, rpcsec_gss_svc_integrity), *free = secured(&other, rpcsec_gss_svc_integrity);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, block_one, client) == 0);
    server_await_block(&server);
    struct timeval time = {.tv_sec = 1};
    double start = now();
    REQUIRE_STATUS(clnt_call(client, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, time),
                   RPC_TIMEDOUT);
    double took = now() - start;
    REQUIRE(took >= 0.99 && took < 15);
    require_echo(free, 1000, 1);
    server_release(&server);
    REQUIRE(pthread_join(thread, NULL) == 0);
    require_echo(client, 1000, 2);
    release(client);
    release(free);
}

static sem_t encoded;

static bool_t xdr_length_told(XDR *xdrs, ...)
{
    va_list arguments;
    va_start(arguments, xdrs);
    bool_t done = xdr_u_int(xdrs, va_arg(arguments, u_int *));
    va_end(arguments);
    REQUIRE(sem_post(&encoded) == 0);
    return done;
}

static suite_blob late;
static void *call_put_off(void *client)
{
    u_int length = 5000;
    struct timeval time = {.tv_sec = 25};
    REQUIRE_STATUS(clnt_call((CLIENT *)client, SUITE_DEFER, xdr_length_told, &length, (xdrproc_t)xdr_suite_blob, &late, time),
                   RPC_SUCCESS);
    return NULL;
}

/* A request without RPCSEC_GSS that is put off is answered without it, though a context was created and used on its connection
 * meanwhile. */
static void gss_beside_a_request_put_off(long service)
{
    struct server server = server_start("-c", "tli", "-g", service_name, NULL);
    CLIENT *client = client_of(&server), *other = client_of(&server);
    AUTH *plain = client->cl_auth;
    pthread_t thread;
    u_int released = 0;
    /* The first call of a connection has its only credit. */
    require_echo(client, 100, 0);
    REQUIRE(sem_init(&encoded, 0, 0) == 0 && pthread_create(&thread, NULL, call_put_off, client) == 0);
    while (sem_wait(&encoded) != 0)
        REQUIRE(errno == EINTR);
    AUTH *gss = rpc_gss_seccreate(client, service_name, mechanism, (rpc_gss_service_t)service, NULL, NULL, NULL);
    REQUIRE(gss != NULL);
    client->cl_auth = gss;
    for (unsigned i = 0; i < 3; i++)
        require_echo(client, 1 + i * 1000, i);
    client->cl_auth = plain;
    while (released == 0)
        REQUIRE_STATUS(suite_release_2(NULL, &released, other), RPC_SUCCESS);
    REQUIRE(pthread_join(thread, NULL) == 0 && released == SUITE_REPLIED);
    suite_blob wanted = blob_of(5000, 5000);
    REQUIRE(late.suite_blob_len == 5000 && memcmp(late.suite_blob_val, wanted.suite_blob_val, 5000) == 0);
    client->cl_auth = gss;
    require_echo(client, 1000, 4);
    release(client);
    clnt_destroy(other);
}

static const char too_long[] = "stock cannot wrap more than its record buffer";

const struct test gss_tests[] = {
    {.name = "gss_none", .run = gss_small, .argument = rpcsec_gss_svc_none, .needs = GSS},
    {.name = "gss_integrity", .run = gss_small, .argument = rpcsec_gss_svc_integrity, .needs = GSS},
    {.name = "gss_privacy", .run = gss_small, .argument = rpcsec_gss_svc_privacy, .needs = GSS},
    {.name = "gss_none_100_KB", .run = gss_large, .argument = rpcsec_gss_svc_none, .needs = GSS},
    {.name = "gss_integrity_100_KB", .run = gss_large, .argument = rpcsec_gss_svc_integrity, .needs = GSS, .not_stock = too_long},
    {.name = "gss_privacy_100_KB", .run = gss_large, .argument = rpcsec_gss_svc_privacy, .needs = GSS, .not_stock = too_long},
    TEST(gss_authgss_create_default, .needs = GSS),
    TEST(gss_connection_after_connection, .needs = GSS),
    TEST(gss_four_threads_on_one_client, .needs = GSS),
    TEST(gss_call_behind_a_busy_context, .needs = GSS, .not_stock = "stock does not count the wait for another thread's call"),
    {.name = "gss_integrity_beside_a_request_put_off", .run = gss_beside_a_request_put_off,
     .argument = rpcsec_gss_svc_integrity, .needs = GSS, .not_stock = "a CLIENT has one call under way there"},
    {.name = "gss_privacy_beside_a_request_put_off", .run = gss_beside_a_request_put_off,
     .argument = rpcsec_gss_svc_privacy, .needs = GSS, .not_stock = "a CLIENT has one call under way there"},
    END_OF_TESTS,
};
#else
const struct test gss_tests[] = {END_OF_TESTS};
#endif
