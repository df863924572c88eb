/* nfs41.c: an NFS version 4.1 client that takes a delegation and returns it when the server recalls it: what the
 * back channel of a session is for, over RDMA.
 *
 *   nfs41 [-c] [-p port] HOST PATH SECONDS
 *
 * opens the file PATH, which begins at the server's root, for reading, with a read delegation, and waits up to
 * SECONDS for the server to call back. It prints a line for each event, and exits with 1 if no recall came. With -c
 * the delegation is returned within the callback, by a call made while the server waits for the answer; else after
 * it.
 *
 * The server's calls come over the connection that this client has made: it listens nowhere. rpcrdma_clnt_serve()
 * names the routine that answers them, which runs while this program waits: in clnt_call() for a reply from the
 * server, or in rpcrdma_clnt_poll() for callbacks only. */
#define _GNU_SOURCE
#include "nfs41.h"
#include <arpa/inet.h>
#include <err.h>
#include <netdb.h>
#include <rpcrdma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Our choice of program number, in the range that RFC 5531 calls transient. Linux calls version 1 of it. */
enum { CALLBACKS = NFS4_CALLBACK + 1 };
/* Calls at a time: one that waits, and one that is made meanwhile in a callback. */
enum { SLOTS = 2 };
/* What fits into a Send at both ends, less the transport header: Linux's server cannot make longer callbacks. */
enum { CALLBACK_SIZE = 4096 - 28 };
enum { FATTR4_LEASE_TIME = 10 };

static CLIENT *client;
static u_quad_t client_id;
static sessionid4 session;
static u_int sequences[SLOTS], slots_used; /* of the last call in each slot */
static unsigned lease; /* seconds */

static nfs_fh4 file;
static stateid4 opened, delegation;
static bool delegated, recalled, within_callback;

/*
 * Calls.
 */

static void must(nfsstat4 status, const char *what)
{
    if (status != NFS4_OK)
        errx(1, "%s: status %d of RFC 8881 section 15.1", what, status);
}

/* Makes one COMPOUND. If it begins with a SEQUENCE, that is filled in here. The status and the results are in *res,
 * which the caller frees. */
static nfsstat4 compound(const char *what, nfs_argop4 *operations, u_int count, COMPOUND4res *res)
{
    COMPOUND4args args = {.tag = "", .minorversion = 1,
                          .argarray = {.argarray_len = count, .argarray_val = operations}};
    struct timeval timeout = {.tv_sec = 25};
    u_int slot = slots_used++;
    bool sequenced = operations->argop == OP_SEQUENCE;
    if (slot == SLOTS)
        errx(1, "%s: a call in a callback in a callback", what);
    if (sequenced) {
        SEQUENCE4args *sequence = &operations->nfs_argop4_u.opsequence;
        *sequence = (SEQUENCE4args){.sa_sequenceid = sequences[slot] + 1, .sa_slotid = slot,
                                    .sa_highest_slotid = SLOTS - 1};
        memcpy(sequence->sa_sessionid, session, sizeof session);
    }
    memset(res, 0, sizeof *res);
    if (clnt_call(client, NFSPROC4_COMPOUND, (xdrproc_t)xdr_COMPOUND4args, (char *)&args,
                  (xdrproc_t)xdr_COMPOUND4res, (char *)res, timeout) != RPC_SUCCESS) {
        warnx("%s", what);
        clnt_perror(client, "server");
        exit(1);
    }
    slots_used--;
    u_int results = res->resarray.resarray_len;
    if (results == 0 || (res->status == NFS4_OK && results != count))
        errx(1, "%s: %u results of %u operations", what, results, count);
    for (u_int i = 0; i < results; i++)
        if (res->resarray.resarray_val[i].resop != operations[i].argop)
            errx(1, "%s: the results are of other operations", what);
    /* Every result begins with its status. The slot is used up if its SEQUENCE was accepted. */
    if (sequenced && res->resarray.resarray_val[0].nfs_resop4_u.status == NFS4_OK)
        sequences[slot]++;
    return res->status;
}
#define COMPOUND(what, operations, res) compound(what, operations, sizeof operations / sizeof *operations, res)

static void free_results(COMPOUND4res *res)
{
    xdr_free((xdrproc_t)xdr_COMPOUND4res, (char *)res);
}

/* The same, when nothing in the results is needed. */
static void do_compound(const char *what, nfs_argop4 *operations, u_int count)
{
    COMPOUND4res res;
    must(compound(what, operations, count, &res), what);
    free_results(&res);
}
#define DO_COMPOUND(what, operations) do_compound(what, operations, sizeof operations / sizeof *operations)

static void open_session(void)
{
    char owner[64];
    int length = snprintf(owner, sizeof owner, "nfs41 example, process %d", (int)getpid());
    client_owner4 who = {.co_ownerid = {.co_ownerid_len = (u_int)length, .co_ownerid_val = owner}};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memcpy(who.co_verifier, &now.tv_nsec, sizeof who.co_verifier);
    nfs_argop4 exchange[] = {{.argop = OP_EXCHANGE_ID, .nfs_argop4_u.opexchange_id.eia_clientowner = who}};
    COMPOUND4res res;
    must(COMPOUND("EXCHANGE_ID", exchange, &res), "EXCHANGE_ID");
    EXCHANGE_ID4resok *known =
        &res.resarray.resarray_val[0].nfs_resop4_u.opexchange_id.EXCHANGE_ID4res_u.eir_resok4;
    client_id = known->eir_clientid;

    callback_sec_parms4 no_security = {.cb_secflavor = AUTH_NONE};
    CREATE_SESSION4args wanted = {
        .csa_clientid = client_id,
        .csa_sequence = known->eir_sequenceid,
        .csa_flags = CREATE_SESSION4_FLAG_CONN_BACK_CHAN,
        .csa_fore_chan_attrs = {.ca_maxrequestsize = 8192, .ca_maxresponsesize = NFS4_DATA_LIMIT + 4096,
                                .ca_maxoperations = NFS4_OPERATIONS, .ca_maxrequests = SLOTS},
        .csa_back_chan_attrs = {.ca_maxrequestsize = CALLBACK_SIZE, .ca_maxresponsesize = CALLBACK_SIZE,
                                .ca_maxoperations = NFS4_OPERATIONS, .ca_maxrequests = 1},
        .csa_cb_program = CALLBACKS,
        .csa_sec_parms = {.csa_sec_parms_len = 1, .csa_sec_parms_val = &no_security},
    };
    free_results(&res);
    nfs_argop4 create[] = {{.argop = OP_CREATE_SESSION, .nfs_argop4_u.opcreate_session = wanted}};
    must(COMPOUND("CREATE_SESSION", create, &res), "CREATE_SESSION");
    CREATE_SESSION4resok *made =
        &res.resarray.resarray_val[0].nfs_resop4_u.opcreate_session.CREATE_SESSION4res_u.csr_resok4;
    if (!(made->csr_flags & CREATE_SESSION4_FLAG_CONN_BACK_CHAN))
        errx(1, "the server has no back channel");
    if (made->csr_fore_chan_attrs.ca_maxrequests < SLOTS)
        errx(1, "the server has too few slots");
    memcpy(session, made->csr_sessionid, sizeof session);
    free_results(&res);

    u_int attribute = 1 << FATTR4_LEASE_TIME;
    nfs_argop4 first[] = {
        {.argop = OP_SEQUENCE},
        {.argop = OP_RECLAIM_COMPLETE},
        {.argop = OP_PUTROOTFH},
        {.argop = OP_GETATTR, .nfs_argop4_u.attr_request = {.bitmap4_len = 1, .bitmap4_val = &attribute}},
    };
    must(COMPOUND("the root's attributes", first, &res), "the root's attributes");
    fattr4 *found = &res.resarray.resarray_val[3].nfs_resop4_u.opgetattr.GETATTR4res_u.obj_attributes;
    if (found->attr_vals.attr_vals_len != sizeof(uint32_t))
        errx(1, "the server does not tell its lease time");
    uint32_t seconds;
    memcpy(&seconds, found->attr_vals.attr_vals_val, sizeof seconds);
    lease = ntohl(seconds);
    free_results(&res);
}

/* Every SEQUENCE renews the lease. Its result tells how the server sees the back channel: a new connection has none
 * until it is asked for. */
static void renew(void)
{
    nfs_argop4 operations[] = {{.argop = OP_SEQUENCE}};
    COMPOUND4res res;
    must(COMPOUND("SEQUENCE", operations, &res), "SEQUENCE");
    u_int flags =
        res.resarray.resarray_val[0].nfs_resop4_u.opsequence.SEQUENCE4res_u.sr_resok4.sr_status_flags;
    free_results(&res);
    if (flags & (SEQ4_STATUS_CB_PATH_DOWN | SEQ4_STATUS_CB_PATH_DOWN_SESSION)) {
        nfs_argop4 bind[] = {{.argop = OP_BIND_CONN_TO_SESSION,
                              .nfs_argop4_u.opbind_conn_to_session.dir = CDFC4_FORE_OR_BOTH}};
        memcpy(bind->nfs_argop4_u.opbind_conn_to_session.sessid, session, sizeof session);
        DO_COMPOUND("BIND_CONN_TO_SESSION", bind);
        puts("the back channel is on a new connection");
    }
}

/* Opens the file, and says whether that brought a delegation. */
static bool open_file(char *path)
{
    nfs_argop4 operations[NFS4_OPERATIONS] = {{.argop = OP_SEQUENCE}, {.argop = OP_PUTROOTFH}};
    u_int count = 2;
    char *name = NULL, *rest = strdupa(path);
    for (char *next; (next = strtok_r(rest, "/", &rest)) != NULL; name = next) {
        if (name != NULL)
            operations[count++] = (nfs_argop4){.argop = OP_LOOKUP, .nfs_argop4_u.objname = name};
        if (count + 2 > NFS4_OPERATIONS)
            errx(2, "%s: too many components", path);
    }
    if (name == NULL)
        errx(2, "%s: not a file", path);
    operations[count++] = (nfs_argop4){
        .argop = OP_OPEN,
        .nfs_argop4_u.opopen = {
            .share_access = OPEN4_SHARE_ACCESS_READ | OPEN4_SHARE_ACCESS_WANT_READ_DELEG,
            .owner = {.clientid = client_id, .owner = {.owner_len = 5, .owner_val = "nfs41"}},
            .openhow = OPEN4_NOCREATE,
            .claim = {.claim = CLAIM_NULL, .open_claim4_u.file = name},
        },
    };
    operations[count++] = (nfs_argop4){.argop = OP_GETFH};
    COMPOUND4res res;
    nfsstat4 status = compound("OPEN", operations, count, &res);
    /* A server that has just started waits for reclaims, and one that recalls a delegation waits for its return. */
    if (status != NFS4ERR_GRACE && status != NFS4ERR_DELAY)
        must(status, path);
    if (status == NFS4_OK) {
        OPEN4resok *ok = &res.resarray.resarray_val[count - 2].nfs_resop4_u.opopen.OPEN4res_u.resok4;
        nfs_fh4 *handle = &res.resarray.resarray_val[count - 1].nfs_resop4_u.opgetfh.GETFH4res_u.object;
        opened = ok->stateid;
        delegated = ok->delegation.delegation_type == OPEN_DELEGATE_READ;
        if (delegated)
            delegation = ok->delegation.open_delegation4_u.read.stateid;
        free(file.nfs_fh4_val);
        file = *handle;
        handle->nfs_fh4_val = NULL;
    }
    free_results(&res);
    return delegated;
}

static void return_delegation(void)
{
    nfs_argop4 operations[] = {
        {.argop = OP_SEQUENCE},
        {.argop = OP_PUTFH, .nfs_argop4_u.object = file},
        {.argop = OP_DELEGRETURN, .nfs_argop4_u.deleg_stateid = delegation},
    };
    delegated = false;
    DO_COMPOUND("DELEGRETURN", operations);
    puts("delegation returned");
}

static void close_all(void)
{
    nfs_argop4 close[] = {
        {.argop = OP_SEQUENCE},
        {.argop = OP_PUTFH, .nfs_argop4_u.object = file},
        {.argop = OP_CLOSE, .nfs_argop4_u.opclose.open_stateid = opened},
    };
    DO_COMPOUND("CLOSE", close);
    nfs_argop4 end[] = {{.argop = OP_DESTROY_SESSION}};
    memcpy(end->nfs_argop4_u.dsa_sessionid, session, sizeof session);
    DO_COMPOUND("DESTROY_SESSION", end);
    nfs_argop4 leave[] = {{.argop = OP_DESTROY_CLIENTID, .nfs_argop4_u.dca_clientid = client_id}};
    DO_COMPOUND("DESTROY_CLIENTID", leave);
}

/*
 * Callbacks.
 */

/* The one slot of the back channel: what was last called in it, and what was answered. */
static u_int callbacks;
static nfs_cb_resop4 answers[NFS4_OPERATIONS];
static CB_COMPOUND4res answered = {.resarray = {.resarray_val = answers}};

static nfsstat4 cb_sequence(const CB_SEQUENCE4args *args, bool *again)
{
    if (memcmp(args->csa_sessionid, session, sizeof session) != 0)
        return NFS4ERR_BADSESSION;
    if (args->csa_slotid != 0)
        return NFS4ERR_BADSLOT;
    *again = callbacks > 0 && args->csa_sequenceid == callbacks;
    if (!*again && args->csa_sequenceid != callbacks + 1)
        return NFS4ERR_SEQ_MISORDERED;
    callbacks = args->csa_sequenceid;
    return NFS4_OK;
}

static nfsstat4 cb_recall(const CB_RECALL4args *args)
{
    puts("callback: CB_RECALL");
    /* The recall may overtake the reply that brings the delegation: the server tries again. */
    if (!delegated || memcmp(args->stateid.other, delegation.other, sizeof delegation.other) != 0)
        return NFS4ERR_BAD_STATEID;
    recalled = true;
    if (within_callback)
        return_delegation();
    return NFS4_OK;
}

/* An answer that does not go into the slot is an error of the first operation. */
static CB_COMPOUND4res *run_callback(const CB_COMPOUND4args *args)
{
    static bool running;
    static nfs_cb_resop4 refusal;
    static CB_COMPOUND4res refused = {.resarray = {.resarray_val = &refusal}};
    const nfs_cb_argop4 *operations = args->argarray.argarray_val;
    u_int count = args->argarray.argarray_len;
    bool again = false;
    nfsstat4 status = NFS4ERR_OP_NOT_IN_SESSION;
    if (args->minorversion != 1)
        status = NFS4ERR_MINOR_VERS_MISMATCH;
    else if (running)
        status = NFS4ERR_DELAY; /* while this one calls forward, another one may come */
    else if (count > 0 && operations->argop == OP_CB_SEQUENCE)
        status = cb_sequence(&operations->nfs_cb_argop4_u.opcbsequence, &again);
    if (status != NFS4_OK) {
        refused.status = refusal.nfs_cb_resop4_u.status = status;
        refused.resarray.resarray_len = count > 0 && args->minorversion == 1;
        refusal.resop = count > 0 ? operations->argop : 0;
        return &refused;
    }
    if (again)
        return &answered;
    CB_SEQUENCE4resok *ok = &answers->nfs_cb_resop4_u.opcbsequence.CB_SEQUENCE4res_u.csr_resok4;
    *ok = (CB_SEQUENCE4resok){.csr_sequenceid = callbacks};
    memcpy(ok->csr_sessionid, session, sizeof session);
    u_int done = 0;
    running = true;
    do {
        if (operations[done].argop == OP_CB_RECALL)
            status = cb_recall(&operations[done].nfs_cb_argop4_u.opcbrecall);
        else if (done > 0)
            status = NFS4ERR_NOTSUPP;
        answers[done].resop = operations[done].argop;
        answers[done].nfs_cb_resop4_u.status = status;
    } while (++done < count && status == NFS4_OK);
    running = false;
    answered.status = status;
    answered.resarray.resarray_len = done;
    return &answered;
}

static void callback(struct svc_req *request, SVCXPRT *transport)
{
    CB_COMPOUND4args args = {0};
    CB_COMPOUND4res *res;
    switch (request->rq_proc) {
    case CB_NULL:
        puts("callback: CB_NULL");
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        break;
    case CB_COMPOUND:
        if (!svc_getargs(transport, (xdrproc_t)xdr_CB_COMPOUND4args, (char *)&args)) {
            svcerr_decode(transport);
            break;
        }
        res = run_callback(&args);
        res->tag = args.tag;
        svc_sendreply(transport, (xdrproc_t)xdr_CB_COMPOUND4res, (char *)res);
        svc_freeargs(transport, (xdrproc_t)xdr_CB_COMPOUND4args, (char *)&args);
        break;
    default:
        svcerr_noproc(transport);
    }
}

static void wait_for_recall(unsigned seconds)
{
    time_t now = time(NULL), end = now + seconds, renewed = now;
    while (!recalled && now < end) {
        struct timeval timeout = {.tv_sec = 1};
        /* Without a connection there are no callbacks. The next call makes a connection. */
        int served = rpcrdma_clnt_poll(client, timeout);
        now = time(NULL);
        if (served < 0 || now - renewed > lease / 3) {
            renew();
            renewed = now;
        }
    }
}

static CLIENT *connect_to(const char *host, const char *port)
{
    struct addrinfo *found, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0)
        errx(1, "%s: %s", host, gai_strerror(error));
    struct netbuf address = {.maxlen = found->ai_addrlen, .len = found->ai_addrlen, .buf = found->ai_addr};
    CLIENT *made = clnt_rdma_create(RPC_ANYFD, &address, NFS4_PROGRAM, NFS_V4, 0, 0);
    freeaddrinfo(found);
    if (made == NULL) {
        clnt_pcreateerror(host);
        exit(1);
    }
    made->cl_auth = authunix_create_default();
    return made;
}

int main(int argc, char **argv)
{
    const char *port = "20049";
    int option;
    while ((option = getopt(argc, argv, "cp:")) != -1) {
        switch (option) {
        case 'c': within_callback = true; break;
        case 'p': port = optarg; break;
        default: argc = 0;
        }
    }
    if (argc - optind != 3)
        errx(2, "usage: nfs41 [-c] [-p port] HOST PATH SECONDS");
    setvbuf(stdout, NULL, _IOLBF, 0);
    client = connect_to(argv[optind], port);
    /* Before there is a session: the server tries its back channel at once, perhaps before it answers. */
    if (!rpcrdma_clnt_serve(client, CALLBACKS, NFS_CB, callback)) {
        clnt_perror(client, "callbacks");
        return 1;
    }
    open_session();
    /* A server that first wants to see its back channel work gives no delegation at the first OPEN. */
    for (int tries = 100; !open_file(argv[optind + 1]); tries--) {
        struct timeval pause = {.tv_usec = 100000};
        if (tries == 0)
            errx(1, "the server gives no delegation");
        rpcrdma_clnt_poll(client, pause);
    }
    puts("delegation: read");
    wait_for_recall((unsigned)strtoul(argv[optind + 2], NULL, 10));
    if (delegated)
        return_delegation();
    close_all();
    free(file.nfs_fh4_val);
    auth_destroy(client->cl_auth);
    clnt_destroy(client);
    if (!recalled)
        errx(1, "no recall came");
    return 0;
}
