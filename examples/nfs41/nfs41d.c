/* nfs41d.c: an NFS version 4.1 server of one directory with one file, which delegates the file and recalls it:
 * what the back channel of a session is for, over RDMA, with the Linux kernel as the client.
 *
 *   nfs41d [-a address] [-p port] FILE
 *   mount -t nfs -o ro,vers=4.1,proto=rdma,port=PORT ADDRESS:/ /mnt
 *
 * prints "READY port", and a line for each event. The file is read once, at the start. Whoever opens it gets a read
 * delegation. A line "recall" on standard input recalls it: with a CB_NULL, which shows that the back channel
 * works, and a CB_RECALL.
 *
 * These calls go over the connection that the client has made, through the CLIENT that rpcrdma_clnt_reverse() makes
 * from the SVCXPRT on which the session was created.
 *
 * It is small: one client with one session at a time (the next one takes its place), no locks, and no
 * writing. Leases do not expire either. */
#define _GNU_SOURCE
#include "nfs41.h"
#include <arpa/inet.h>
#include <err.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a file handle names: a node is its own inode number too. NOWHERE means no file handle. */
enum node { NOWHERE, ROOT, THE_FILE };

static char *content, *file_name;
static struct stat st;

static void *allocate(size_t size)
{
    void *memory = calloc(1, size);
    if (memory == NULL)
        err(1, "out of memory");
    return memory;
}

static char *copy(const char *text)
{
    return strcpy(allocate(strlen(text) + 1), text);
}

/*
 * The client, its session and what it has open.
 */

enum { SLOTS = 16, OPENS = 64 };

static struct {
    u_quad_t id; /* grows from client to client */
    bool confirmed; /* by a session */
    verifier4 verifier;
    u_int owner_length;
    char owner[NFS4_OPAQUE_LIMIT];
    u_int sequence; /* of the next CREATE_SESSION */
    CREATE_SESSION4resok created; /* what the last one got */
} known;

/* RFC 8881 section 2.10.6.1: a call that comes again gets the same answer as the first time. */
struct slot {
    u_int sequence;
    COMPOUND4res last;
};
static struct {
    bool lives;
    sessionid4 id;
    struct slot slots[SLOTS];
    CLIENT *back; /* NULL: no back channel */
    bool is_down; /* the last callback failed */
    u_int callbacks;
} session;
static bool calling; /* a callback waits for its reply */

/* The beginning of a stateid tells what it belongs to; the rest makes it unique. */
static stateid4 opens[OPENS], delegation;
static nfs_fh4 owners[OPENS]; /* as bytes and their number */
static bool delegated;

static stateid4 new_stateid(char kind)
{
    static uint64_t made;
    stateid4 new = {.seqid = 1, .other = {kind}};
    made++;
    memcpy(new.other + 4, &made, sizeof made);
    return new;
}

static bool same_state(const stateid4 *a, const stateid4 *b)
{
    return a->other[0] != 0 && memcmp(a->other, b->other, sizeof a->other) == 0;
}

/* The place of a stateid, or -1. */
static int find_open(const stateid4 *stateid)
{
    for (int i = 0; i < OPENS; i++)
        if (same_state(&opens[i], stateid))
            return i;
    return -1;
}

static void close_open(int i)
{
    opens[i] = (stateid4){0};
    free(owners[i].nfs_fh4_val);
    owners[i] = (nfs_fh4){0};
}

/* A client that has opened nothing READs with a stateid of all zeros or all ones. */
static bool may_read(const stateid4 *stateid)
{
    static const char zeros[12];
    char ones[12];
    memset(ones, 0xff, sizeof ones);
    return memcmp(stateid->other, zeros, sizeof zeros) == 0 || memcmp(stateid->other, ones, sizeof ones) == 0 ||
           find_open(stateid) >= 0 || (delegated && same_state(&delegation, stateid));
}

/* Also empties the result, for the next use. */
static void free_results(COMPOUND4res *res)
{
    for (u_int i = 0; i < res->resarray.resarray_len; i++) {
        nfs_resop4 *result = &res->resarray.resarray_val[i];
        if (result->resop == OP_READ)
            result->nfs_resop4_u.opread.READ4res_u.resok4.data.data_val = NULL; /* our content */
    }
    xdr_free((xdrproc_t)xdr_COMPOUND4res, (char *)res);
    memset(res, 0, sizeof *res);
}

static void end_session(void)
{
    if (session.back != NULL) {
        auth_destroy(session.back->cl_auth);
        clnt_destroy(session.back);
    }
    for (int i = 0; i < SLOTS; i++)
        free_results(&session.slots[i].last);
    memset(&session, 0, sizeof session);
}

static void forget_client(void)
{
    end_session();
    for (int i = 0; i < OPENS; i++)
        close_open(i);
    delegated = false;
    known.confirmed = false;
    known.owner_length = 0;
}

/*
 * Attributes: those that are supported, in the order of their numbers (RFC 8881 section 5).
 */

static void put_string(XDR *xdrs, char *text)
{
    xdr_string(xdrs, &text, NFS4_OPAQUE_LIMIT);
}
static void put_time(XDR *xdrs, struct timespec time)
{
    uint64_t seconds = (uint64_t)time.tv_sec;
    uint32_t nseconds = (uint32_t)time.tv_nsec;
    xdr_uint64_t(xdrs, &seconds);
    xdr_uint32_t(xdrs, &nseconds);
}
static void put_word(XDR *xdrs, uint32_t value)
{
    xdr_uint32_t(xdrs, &value);
}
static void put_hyper(XDR *xdrs, uint64_t value)
{
    xdr_uint64_t(xdrs, &value);
}

static uint32_t supported[2]; /* as a bitmap, found out at the start */

/* Puts one attribute, or says that it is not supported. */
static bool put_attribute(XDR *xdrs, unsigned number, enum node node)
{
    switch (number) {
    case 0: /* supported_attrs */
        put_word(xdrs, 2);
        put_word(xdrs, supported[0]);
        put_word(xdrs, supported[1]);
        return true;
    case 1: put_word(xdrs, node == ROOT ? 2 : 1); return true; /* type: NF4DIR, NF4REG */
    case 2: put_word(xdrs, 0); return true; /* fh_expire_type: FH4_PERSISTENT */
    case 3: put_hyper(xdrs, (uint64_t)st.st_mtime); return true; /* change */
    case 4: put_hyper(xdrs, node == ROOT ? 4096 : (uint64_t)st.st_size); return true; /* size */
    case 5: case 6: case 7: put_word(xdrs, 0); return true; /* link_support, symlink_support, named_attr */
    case 8: put_hyper(xdrs, 41); put_hyper(xdrs, 0); return true; /* fsid */
    case 9: put_word(xdrs, 1); return true; /* unique_handles */
    case 10: put_word(xdrs, 90); return true; /* lease_time */
    case 11: put_word(xdrs, NFS4_OK); return true; /* rdattr_error */
    case 19: put_word(xdrs, 4); put_word(xdrs, node); return true; /* filehandle */
    case 20: case 55: put_hyper(xdrs, node); return true; /* fileid, mounted_on_fileid */
    case 27: put_hyper(xdrs, INT64_MAX); return true; /* maxfilesize */
    case 28: put_word(xdrs, 1); return true; /* maxlink */
    case 29: put_word(xdrs, 255); return true; /* maxname */
    case 30: case 31: put_hyper(xdrs, NFS4_DATA_LIMIT); return true; /* maxread, maxwrite */
    case 33: put_word(xdrs, node == ROOT ? 0555 : 0444); return true; /* mode */
    case 35: put_word(xdrs, node == ROOT ? 2 : 1); return true; /* numlinks */
    case 36: case 37: put_string(xdrs, "0"); return true; /* owner, owner_group */
    case 45: put_hyper(xdrs, (uint64_t)st.st_size); return true; /* space_used */
    case 47: case 52: case 53: put_time(xdrs, st.st_mtim); return true; /* time_access, _metadata, _modify */
    default: return false;
    }
}

static fattr4 attributes_of(enum node node, const bitmap4 *wanted)
{
    enum { ROOM = 512 };
    uint32_t *mask = allocate(2 * sizeof *mask);
    char *values = allocate(ROOM);
    XDR xdrs;
    xdrmem_create(&xdrs, values, ROOM, XDR_ENCODE);
    for (unsigned number = 0; number < 64 && number / 32 < wanted->bitmap4_len; number++)
        if ((wanted->bitmap4_val[number / 32] >> number % 32 & 1) && put_attribute(&xdrs, number, node))
            mask[number / 32] |= 1u << number % 32;
    return (fattr4){.attrmask = {.bitmap4_len = 2, .bitmap4_val = mask},
                    .attr_vals = {.attr_vals_len = xdr_getpos(&xdrs), .attr_vals_val = values}};
}

/*
 * Operations. Each returns its status, and has only its results to fill in.
 */

/* The state of one COMPOUND. */
struct run {
    SVCXPRT *transport;
    bool sequenced;
    enum node current;
};

static nfsstat4 exchange_id(const EXCHANGE_ID4args *args, EXCHANGE_ID4resok *ok)
{
    const client_owner4 *who = &args->eia_clientowner;
    bool is_known = known.owner_length == who->co_ownerid.co_ownerid_len &&
                    memcmp(known.owner, who->co_ownerid.co_ownerid_val, known.owner_length) == 0 &&
                    memcmp(known.verifier, who->co_verifier, sizeof known.verifier) == 0;
    if (!is_known) {
        forget_client();
        known.id++;
        known.sequence = 1;
        known.owner_length = who->co_ownerid.co_ownerid_len;
        memcpy(known.owner, who->co_ownerid.co_ownerid_val, known.owner_length);
        memcpy(known.verifier, who->co_verifier, sizeof known.verifier);
    }
    *ok = (EXCHANGE_ID4resok){
        .eir_clientid = known.id,
        .eir_sequenceid = known.sequence,
        .eir_flags = EXCHGID4_FLAG_USE_NON_PNFS | (known.confirmed ? EXCHGID4_FLAG_CONFIRMED_R : 0),
        .eir_state_protect = SP4_NONE,
        .eir_server_owner = {.so_major_id = {.so_major_id_len = 6, .so_major_id_val = copy("nfs41d")}},
        .eir_server_scope = {.eir_server_scope_len = 6, .eir_server_scope_val = copy("nfs41d")},
    };
    return NFS4_OK;
}

static u_int least(u_int a, u_int b)
{
    return a < b ? a : b;
}

/* The first of the security flavors offered by the client for callbacks that we support; Linux wants AUTH_SYS. */
static AUTH *callback_security(const CREATE_SESSION4args *args)
{
    for (u_int i = 0; i < args->csa_sec_parms.csa_sec_parms_len; i++) {
        callback_sec_parms4 *way = &args->csa_sec_parms.csa_sec_parms_val[i];
        cb_sys_parms *sys = &way->callback_sec_parms4_u.cbsp_sys_cred;
        if (way->cb_secflavor == AUTH_SYS)
            return authunix_create(sys->machinename, sys->uid, sys->gid, (int)sys->gids.gids_len,
                                   sys->gids.gids_val);
    }
    return authnone_create();
}

static nfsstat4 create_session(const CREATE_SESSION4args *args, CREATE_SESSION4resok *ok, struct run *run)
{
    if (args->csa_clientid != known.id || known.owner_length == 0)
        return NFS4ERR_STALE_CLIENTID;
    if (args->csa_sequence + 1 == known.sequence && session.lives) {
        *ok = known.created; /* it comes again */
        return NFS4_OK;
    }
    if (args->csa_sequence != known.sequence)
        return NFS4ERR_SEQ_MISORDERED;
    end_session();
    session.lives = true;
    memcpy(session.id, &known.id, sizeof known.id);
    memcpy(session.id + sizeof known.id, &known.sequence, sizeof known.sequence);
    if (args->csa_flags & CREATE_SESSION4_FLAG_CONN_BACK_CHAN) {
        session.back = rpcrdma_clnt_reverse(run->transport, args->csa_cb_program, NFS_CB);
        if (session.back != NULL)
            session.back->cl_auth = callback_security(args);
        else
            warnx("no back channel%s", clnt_spcreateerror(""));
    }
    known.confirmed = true;
    *ok = (CREATE_SESSION4resok){
        .csr_sequence = known.sequence++,
        .csr_flags = session.back != NULL ? CREATE_SESSION4_FLAG_CONN_BACK_CHAN : 0,
        .csr_fore_chan_attrs = args->csa_fore_chan_attrs,
        .csr_back_chan_attrs = args->csa_back_chan_attrs,
    };
    memcpy(ok->csr_sessionid, session.id, sizeof session.id);
    channel_attrs4 *fore = &ok->csr_fore_chan_attrs;
    fore->ca_headerpadsize = 0;
    fore->ca_maxrequestsize = least(fore->ca_maxrequestsize, NFS4_DATA_LIMIT);
    fore->ca_maxresponsesize = least(fore->ca_maxresponsesize, NFS4_DATA_LIMIT + 4096);
    fore->ca_maxresponsesize_cached = fore->ca_maxresponsesize;
    fore->ca_maxoperations = least(fore->ca_maxoperations, NFS4_OPERATIONS);
    fore->ca_maxrequests = least(fore->ca_maxrequests, SLOTS);
    /* The words of ca_rdma_ird belong to the request. None are needed. */
    fore->ca_rdma_ird.ca_rdma_ird_len = ok->csr_back_chan_attrs.ca_rdma_ird.ca_rdma_ird_len = 0;
    fore->ca_rdma_ird.ca_rdma_ird_val = ok->csr_back_chan_attrs.ca_rdma_ird.ca_rdma_ird_val = NULL;
    known.created = *ok;
    printf("session %s\n", session.back != NULL ? "with a back channel" : "without a back channel");
    return NFS4_OK;
}

/* The client has connected again, and puts the back channel on the new connection. */
static nfsstat4 bind_connection(const BIND_CONN_TO_SESSION4 *args, BIND_CONN_TO_SESSION4 *ok, struct run *run)
{
    if (!session.lives || memcmp(args->sessid, session.id, sizeof session.id) != 0)
        return NFS4ERR_BADSESSION;
    *ok = *args;
    ok->dir = CDFS4_FORE;
    ok->use_conn_in_rdma_mode = FALSE;
    if ((args->dir & CDFC4_BACK) && session.back != NULL && rpcrdma_clnt_rebind(session.back, run->transport)) {
        ok->dir = CDFS4_BOTH;
        session.is_down = false;
        puts("the back channel is on a new connection");
    }
    return NFS4_OK;
}

static nfsstat4 destroy_session(const sessionid4 id)
{
    if (!session.lives || memcmp(id, session.id, sizeof session.id) != 0)
        return NFS4ERR_BADSESSION;
    end_session();
    puts("session ended");
    return NFS4_OK;
}

static nfsstat4 destroy_clientid(u_quad_t id)
{
    if (id != known.id || known.owner_length == 0)
        return NFS4ERR_STALE_CLIENTID;
    if (session.lives)
        return NFS4ERR_CLIENTID_BUSY;
    forget_client();
    return NFS4_OK;
}

/* A SEQUENCE opens the COMPOUND: *slot is where it belongs, and *again says that its answer is already there. */
static nfsstat4 enter(const SEQUENCE4args *args, struct slot **slot, bool *again)
{
    if (!session.lives || memcmp(args->sa_sessionid, session.id, sizeof session.id) != 0)
        return NFS4ERR_BADSESSION;
    if (args->sa_slotid >= SLOTS)
        return NFS4ERR_BADSLOT;
    struct slot *found = &session.slots[args->sa_slotid];
    *again = args->sa_sequenceid == found->sequence && found->last.resarray.resarray_len > 0;
    if (!*again && args->sa_sequenceid != found->sequence + 1)
        return NFS4ERR_SEQ_MISORDERED;
    found->sequence = args->sa_sequenceid;
    *slot = found;
    return NFS4_OK;
}

static void entered(const SEQUENCE4args *args, SEQUENCE4resok *ok)
{
    *ok = (SEQUENCE4resok){
        .sr_sequenceid = args->sa_sequenceid,
        .sr_slotid = args->sa_slotid,
        .sr_highest_slotid = SLOTS - 1,
        .sr_target_highest_slotid = SLOTS - 1,
        .sr_status_flags = session.is_down ? SEQ4_STATUS_CB_PATH_DOWN : 0,
    };
    memcpy(ok->sr_sessionid, session.id, sizeof session.id);
}

static nfsstat4 look_up(const char *name, struct run *run)
{
    if (run->current != ROOT)
        return NFS4ERR_NOTDIR;
    if (strcmp(name, file_name) != 0)
        return NFS4ERR_NOENT;
    run->current = THE_FILE;
    return NFS4_OK;
}

static nfsstat4 put_handle(const nfs_fh4 *handle, struct run *run)
{
    uint32_t node;
    if (handle->nfs_fh4_len != sizeof node)
        return NFS4ERR_BADHANDLE;
    memcpy(&node, handle->nfs_fh4_val, sizeof node);
    if (ntohl(node) != ROOT && ntohl(node) != THE_FILE)
        return NFS4ERR_BADHANDLE;
    run->current = ntohl(node);
    return NFS4_OK;
}

static nfs_fh4 handle_of(enum node node)
{
    uint32_t *bytes = allocate(sizeof *bytes);
    *bytes = htonl(node);
    return (nfs_fh4){.nfs_fh4_len = sizeof *bytes, .nfs_fh4_val = (char *)bytes};
}

/* Finds the file that an OPEN means, by name or because it is the current one. */
static nfsstat4 claim(const open_claim4 *claim, struct run *run)
{
    const open_claim_delegate_cur4 *by_name = &claim->open_claim4_u.delegate_cur_info;
    const stateid4 *held = NULL;
    nfsstat4 status = run->current == THE_FILE ? NFS4_OK : NFS4ERR_ISDIR;
    switch (claim->claim) {
    case CLAIM_NULL:
        status = look_up(claim->open_claim4_u.file, run);
        break;
    case CLAIM_DELEGATE_CUR:
        status = look_up(by_name->file, run);
        held = &by_name->delegate_stateid;
        break;
    case CLAIM_DELEG_CUR_FH:
        held = &claim->open_claim4_u.oc_delegate_stateid;
        break;
    case CLAIM_FH:
        break;
    case CLAIM_PREVIOUS:
        status = NFS4ERR_NO_GRACE;
    }
    if (status == NFS4_OK && held != NULL && !(delegated && same_state(held, &delegation)))
        status = NFS4ERR_BAD_STATEID;
    return status;
}

static nfsstat4 open_file(const OPEN4args *args, OPEN4resok *ok, struct run *run)
{
    if (args->openhow != OPEN4_NOCREATE || (args->share_access & OPEN4_SHARE_ACCESS_WRITE))
        return NFS4ERR_ROFS;
    nfsstat4 status = claim(&args->claim, run);
    if (status != NFS4_OK)
        return status;
    /* An owner who opens the file again gets the same stateid, with the next sequence number. */
    const u_int length = args->owner.owner.owner_len;
    int at = -1;
    for (int i = 0; i < OPENS; i++) {
        bool taken = opens[i].other[0] != 0;
        if (!taken && at < 0)
            at = i;
        if (taken && owners[i].nfs_fh4_len == length &&
            memcmp(owners[i].nfs_fh4_val, args->owner.owner.owner_val, length) == 0) {
            at = i;
            break;
        }
    }
    if (at < 0)
        return NFS4ERR_DELAY;
    if (opens[at].other[0] == 0) {
        opens[at] = new_stateid('o');
        owners[at].nfs_fh4_len = length;
        owners[at].nfs_fh4_val = allocate(length + 1);
        memcpy(owners[at].nfs_fh4_val, args->owner.owner.owner_val, length);
    } else {
        opens[at].seqid++;
    }
    ok->stateid = opens[at];
    ok->cinfo = (change_info4){.atomic = TRUE, .before = (u_quad_t)st.st_mtime, .after = (u_quad_t)st.st_mtime};
    bool wanted = (args->share_access & OPEN4_SHARE_ACCESS_WANT_DELEG_MASK) != OPEN4_SHARE_ACCESS_WANT_NO_DELEG;
    bool claimed = args->claim.claim == CLAIM_DELEGATE_CUR || args->claim.claim == CLAIM_DELEG_CUR_FH;
    if (wanted && !claimed && !delegated && session.back != NULL && !session.is_down) {
        delegated = true;
        delegation = new_stateid('d');
        open_read_delegation4 *given = &ok->delegation.open_delegation4_u.read;
        ok->delegation.delegation_type = OPEN_DELEGATE_READ;
        given->stateid = delegation;
        given->permissions.who = copy("");
        puts("delegation: read");
    }
    return NFS4_OK;
}

static nfsstat4 close_file(const stateid4 *stateid, stateid4 *closed)
{
    int i = find_open(stateid);
    if (i < 0)
        return NFS4ERR_BAD_STATEID;
    *closed = opens[i];
    closed->seqid++;
    close_open(i);
    return NFS4_OK;
}

static nfsstat4 return_delegation(const stateid4 *stateid)
{
    if (!delegated || !same_state(&delegation, stateid))
        return NFS4ERR_BAD_STATEID;
    delegated = false;
    puts("delegation returned");
    return NFS4_OK;
}

static nfsstat4 read_file(const READ4args *args, READ4resok *ok, const struct run *run)
{
    if (run->current != THE_FILE)
        return NFS4ERR_ISDIR;
    if (!may_read(&args->stateid))
        return NFS4ERR_BAD_STATEID;
    u_quad_t size = (u_quad_t)st.st_size;
    u_quad_t left = args->offset < size ? size - args->offset : 0;
    ok->data.data_len = least(args->count, NFS4_DATA_LIMIT);
    if (ok->data.data_len >= left) {
        ok->data.data_len = (u_int)left;
        ok->eof = TRUE;
    }
    ok->data.data_val = content + (size - left);
    return NFS4_OK;
}

static nfsstat4 read_directory(const READDIR4args *args, READDIR4resok *ok, const struct run *run)
{
    if (run->current != ROOT)
        return NFS4ERR_NOTDIR;
    if (args->maxcount < 1024 + strlen(file_name))
        return NFS4ERR_TOOSMALL;
    ok->eof = TRUE;
    /* The cookies 1 and 2 are not used (RFC 8881 section 18.23.3). */
    if (args->cookie == 0) {
        ok->entries = allocate(sizeof *ok->entries);
        ok->entries->cookie = 3;
        ok->entries->name = copy(file_name);
        ok->entries->attrs = attributes_of(THE_FILE, &args->attr_request);
    }
    return NFS4_OK;
}

static nfsstat4 allowed(u_int asked, ACCESS4resok *ok, const struct run *run)
{
    enum { READ = 0x01, LOOKUP = 0x02, ALL = 0x3f };
    ok->supported = asked & ALL;
    ok->access = asked & (run->current == ROOT ? READ | LOOKUP : READ);
    return NFS4_OK;
}

static nfsstat4 operate(const nfs_argop4 *operation, nfs_resop4 *result, struct run *run)
{
#define ARGS operation->nfs_argop4_u
#define OK(member, type, ok) result->nfs_resop4_u.member.type##res_u.ok
    /* These come without a SEQUENCE. They may end the session, and so must wait while a callback is under way: requests
     * that come then are dispatched in the midst of it. */
    if (!run->sequenced && calling)
        return NFS4ERR_DELAY;
    switch (run->sequenced ? OP_SEQUENCE : (int)operation->argop) {
    case OP_EXCHANGE_ID:
        return exchange_id(&ARGS.opexchange_id, &OK(opexchange_id, EXCHANGE_ID4, eir_resok4));
    case OP_CREATE_SESSION:
        return create_session(&ARGS.opcreate_session, &OK(opcreate_session, CREATE_SESSION4, csr_resok4), run);
    case OP_BIND_CONN_TO_SESSION:
        return bind_connection(&ARGS.opbind_conn_to_session,
                               &OK(opbind_conn_to_session, BIND_CONN_TO_SESSION4, bctsr_resok4), run);
    case OP_DESTROY_SESSION:
        return destroy_session(ARGS.dsa_sessionid);
    case OP_DESTROY_CLIENTID:
        return destroy_clientid(ARGS.dca_clientid);
    }
    if (!run->sequenced)
        return NFS4ERR_OP_NOT_IN_SESSION;
    switch ((int)operation->argop) {
    case OP_RECLAIM_COMPLETE:
        return NFS4_OK;
    case OP_PUTROOTFH:
        run->current = ROOT;
        return NFS4_OK;
    case OP_PUTFH:
        return put_handle(&ARGS.object, run);
    }
    if (run->current == NOWHERE)
        return NFS4ERR_NOFILEHANDLE;
    switch ((int)operation->argop) {
    case OP_SECINFO_NO_NAME: {
        SECINFO4res *secinfo = &result->nfs_resop4_u.opsecinfo_no_name;
        secinfo->SECINFO4res_u.flavors.flavors_len = 1;
        secinfo->SECINFO4res_u.flavors.flavors_val = allocate(sizeof(u_int));
        *secinfo->SECINFO4res_u.flavors.flavors_val = AUTH_SYS;
        run->current = NOWHERE;
        return NFS4_OK;
    }
    case OP_GETFH:
        OK(opgetfh, GETFH4, object) = handle_of(run->current);
        return NFS4_OK;
    case OP_GETATTR:
        OK(opgetattr, GETATTR4, obj_attributes) = attributes_of(run->current, &ARGS.attr_request);
        return NFS4_OK;
    case OP_LOOKUP:
        return look_up(ARGS.objname, run);
    case OP_ACCESS:
        return allowed(ARGS.access, &OK(opaccess, ACCESS4, resok4), run);
    case OP_OPEN:
        return open_file(&ARGS.opopen, &OK(opopen, OPEN4, resok4), run);
    case OP_CLOSE:
        return close_file(&ARGS.opclose.open_stateid, &OK(opclose, CLOSE4, open_stateid));
    case OP_DELEGRETURN:
        return return_delegation(&ARGS.deleg_stateid);
    case OP_READ:
        return read_file(&ARGS.opread, &OK(opread, READ4, resok4), run);
    case OP_READDIR:
        return read_directory(&ARGS.opreaddir, &OK(opreaddir, READDIR4, resok4), run);
    }
    return NFS4ERR_NOTSUPP;
}

static void run_compound(const COMPOUND4args *args, COMPOUND4res *res, SVCXPRT *transport)
{
    struct run run = {.transport = transport, .current = NOWHERE};
    nfs_argop4 *operations = args->argarray.argarray_val;
    res->status = args->minorversion == 1 ? NFS4_OK : NFS4ERR_MINOR_VERS_MISMATCH;
    res->resarray.resarray_val = allocate(NFS4_OPERATIONS * sizeof(nfs_resop4));
    for (u_int i = 0; i < args->argarray.argarray_len && res->status == NFS4_OK; i++) {
        nfs_resop4 *result = &res->resarray.resarray_val[res->resarray.resarray_len++];
        result->resop = operations[i].argop;
        if (result->resop != OP_SEQUENCE) {
            res->status = operate(&operations[i], result, &run);
        } else if (i == 0) {
            run.sequenced = true;
            entered(&operations->nfs_argop4_u.opsequence,
                    &result->nfs_resop4_u.opsequence.SEQUENCE4res_u.sr_resok4);
        } else {
            res->status = NFS4ERR_SEQUENCE_POS;
        }
        /* Every result begins with its status. */
        result->nfs_resop4_u.status = res->status;
    }
}

static void dispatch(struct svc_req *request, SVCXPRT *transport)
{
    COMPOUND4args args = {0};
    COMPOUND4res made = {0}, *res = &made;
    struct slot *slot = NULL;
    bool again = false;
    if (request->rq_proc == NFSPROC4_NULL) {
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (request->rq_proc != NFSPROC4_COMPOUND) {
        svcerr_noproc(transport);
        return;
    }
    if (!svc_getargs(transport, (xdrproc_t)xdr_COMPOUND4args, (char *)&args)) {
        svcerr_decode(transport);
        return;
    }
    const nfs_argop4 *first = args.argarray.argarray_len > 0 ? args.argarray.argarray_val : NULL;
    nfsstat4 status = NFS4_OK;
    if (first != NULL && first->argop == OP_SEQUENCE && args.minorversion == 1)
        status = enter(&first->nfs_argop4_u.opsequence, &slot, &again);
    nfs_resop4 refusal = {.resop = OP_SEQUENCE, .nfs_resop4_u.status = status};
    COMPOUND4res refused = {.status = status, .resarray = {.resarray_len = 1, .resarray_val = &refusal}};
    if (status != NFS4_OK)
        res = &refused;
    else if (again)
        res = &slot->last;
    else
        run_compound(&args, &made, transport);
    res->tag = args.tag;
    svc_sendreply(transport, (xdrproc_t)xdr_COMPOUND4res, (char *)res);
    res->tag = NULL;
    svc_freeargs(transport, (xdrproc_t)xdr_COMPOUND4args, (char *)&args);
    /* The answer is kept in its slot. */
    if (slot != NULL && !again) {
        free_results(&slot->last);
        slot->last = made;
    } else {
        free_results(&made);
    }
}

/*
 * Callbacks.
 */

static bool call_back(const char *what, u_int procedure, CB_COMPOUND4args *args, CB_COMPOUND4res *res)
{
    struct timeval timeout = {.tv_sec = 10};
    calling = true;
    enum clnt_stat outcome =
        args != NULL ? clnt_call(session.back, procedure, (xdrproc_t)xdr_CB_COMPOUND4args, (char *)args,
                                 (xdrproc_t)xdr_CB_COMPOUND4res, (char *)res, timeout)
                     : clnt_call(session.back, procedure, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL,
                                 timeout);
    calling = false;
    session.is_down = outcome != RPC_SUCCESS;
    printf("%s: %s\n", what, outcome == RPC_SUCCESS ? "answered" : clnt_sperror(session.back, "failed"));
    return outcome == RPC_SUCCESS;
}

static void recall(void)
{
    if (!delegated || session.back == NULL) {
        puts("nothing to recall");
        return;
    }
    if (!call_back("CB_NULL", CB_NULL, NULL, NULL))
        return;
    nfs_cb_argop4 operations[] = {
        {.argop = OP_CB_SEQUENCE, .nfs_cb_argop4_u.opcbsequence = {.csa_sequenceid = session.callbacks + 1}},
        {.argop = OP_CB_RECALL, .nfs_cb_argop4_u.opcbrecall = {.stateid = delegation, .fh = handle_of(THE_FILE)}},
    };
    memcpy(operations->nfs_cb_argop4_u.opcbsequence.csa_sessionid, session.id, sizeof session.id);
    CB_COMPOUND4args args = {.tag = "", .minorversion = 1,
                             .argarray = {.argarray_len = 2, .argarray_val = operations}};
    CB_COMPOUND4res res = {0};
    if (call_back("CB_RECALL", CB_COMPOUND, &args, &res)) {
        nfs_cb_resop4 *results = res.resarray.resarray_val;
        if (res.resarray.resarray_len > 0 && results->nfs_cb_resop4_u.status == NFS4_OK)
            session.callbacks++;
        printf("CB_RECALL: status %d\n", res.status);
    }
    xdr_free((xdrproc_t)xdr_CB_COMPOUND4res, (char *)&res);
    free(operations[1].nfs_cb_argop4_u.opcbrecall.fh.nfs_fh4_val);
}

/* One line of standard input. False at its end. */
static bool command(void)
{
    static char line[64];
    static size_t length;
    ssize_t got = read(STDIN_FILENO, line + length, sizeof line - length);
    if (got <= 0)
        return false;
    length += (size_t)got;
    char *end = memchr(line, '\n', length);
    if (end == NULL && length < sizeof line)
        return true;
    if (length >= 7 && memcmp(line, "recall\n", 7) == 0)
        recall();
    else
        warnx("not a command: recall is one");
    length = 0;
    return true;
}

/*
 * The start.
 */

static void read_content(char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        err(1, "%s", path);
    content = allocate((size_t)st.st_size + 1);
    for (off_t done = 0, got; done < st.st_size; done += got)
        if ((got = read(fd, content + done, (size_t)(st.st_size - done))) <= 0)
            err(1, "%s", path);
    close(fd);
    file_name = basename(path);
    u_int everything[] = {~0u, ~0u};
    fattr4 all = attributes_of(THE_FILE, &(bitmap4){.bitmap4_len = 2, .bitmap4_val = everything});
    memcpy(supported, all.attrmask.bitmap4_val, sizeof supported);
    xdr_free((xdrproc_t)xdr_fattr4, (char *)&all);
}

int main(int argc, char **argv)
{
    const char *where = "0.0.0.0";
    unsigned long port = 20049;
    int option;
    while ((option = getopt(argc, argv, "a:p:")) != -1) {
        switch (option) {
        case 'a': where = optarg; break;
        case 'p': port = strtoul(optarg, NULL, 10); break;
        default: argc = 0;
        }
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (argc - optind != 1 || inet_pton(AF_INET, where, &address.sin_addr) != 1)
        errx(2, "usage: nfs41d [-a address] [-p port] FILE");
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    read_content(argv[optind]);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    known.id = (u_quad_t)now.tv_sec << 32; /* unlike those before a restart */

    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0)
        err(1, "port %lu", port);
    SVCXPRT *listener = svc_rdma_create(fd, 0, 0);
    if (listener == NULL)
        errx(1, "cannot listen%s", clnt_spcreateerror(""));
    if (!svc_reg(listener, NFS4_PROGRAM, NFS_V4, dispatch, NULL))
        errx(1, "cannot register the program");
    printf("READY %u\n", ntohs(((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port));

    /* svc_run(), but watching standard input too. */
    for (bool commands = true;;) {
        int count = svc_max_pollfd;
        struct pollfd fds[count + 1];
        memcpy(fds, svc_pollfd, (size_t)count * sizeof *fds);
        fds[count] = (struct pollfd){.fd = commands ? STDIN_FILENO : -1, .events = POLLIN};
        int ready = poll(fds, (nfds_t)count + 1, -1);
        if (ready > 0 && fds[count].revents != 0) {
            commands = command();
            ready--;
        }
        if (ready > 0)
            svc_getreq_poll(fds, ready);
    }
}
