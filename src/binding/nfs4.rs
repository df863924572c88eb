//! The COMPOUND of NFS version 4: minor versions 0 (RFC 7530), 1 (RFC 8881), 2 (RFC 7862) and the extended
//! attributes of RFC 8276.
//!
//! RFC 8267 §6.1: "Only the following XDR data items in the COMPOUND procedure of all NFS version 4 minor
//! versions are DDP-eligible": the data of WRITE and READ, the text of a symbolic link in CREATE and
//! READLINK. To find them the walk knows every operation. One that it does not know ends the walk: what follows may be anything.
//!
//! The minor versions share their operations' numbers and forms, so one table serves them all.
#![forbid(unsafe_code)]

use super::{PATH, Row, Stop, Walk, Walked, fixed, nothing, padded, row};

/// COMPOUND4args: tag, minorversion, operations.
pub(super) fn arguments(walk: &mut Walk<'_>) -> Walked {
    let tag = walk.counted()?;
    walk.word()?;
    // The status, the tag again, the number of results.
    walk.reply(12 + padded(tag));
    walk.list(|walk| {
        let number = walk.word()?;
        // Number and status.
        walk.reply(8);
        (operation(number)?.arguments)(walk)
    })?;
    Ok(())
}

/// COMPOUND4res: status, tag, results.
pub(super) fn results(walk: &mut Walk<'_>) -> Walked {
    walk.word()?;
    walk.opaque()?;
    for _ in 0..walk.word()? {
        let number = walk.word()?;
        if walk.word()? != 0 {
            // RFC 8881 §16.2.3: the server goes on "until one of the operations has a status value other than
            // NFS4_OK": this result is the last.
            return Ok(());
        }
        (operation(number)?.results)(walk)?;
    }
    Ok(())
}

fn operation(number: u32) -> Result<&'static Row, Stop> {
    const FIRST: u32 = 3;
    // Not searched for: a hostile COMPOUND has as many operations as it has words.
    let row = match number {
        ILLEGAL => OPERATIONS.last(),
        _ => OPERATIONS.get(number.checked_sub(FIRST).ok_or(Stop::Unknown)? as usize),
    };
    row.filter(|row| row.number == number).ok_or(Stop::Unknown)
}

const STATEID: usize = 16;
const SESSIONID: usize = 16;
const DEVICEID: usize = 16;
const VERIFIER: usize = 8;
/// nfstime4.
const TIME: usize = 12;
/// change_info4.
const CHANGE: usize = 20;
/// NFS4_FHSIZE.
const FH: usize = 128;
/// A bitmap4 in a reply, which has no limit: room for 256 attributes, twice as many as there are.
const BITMAP: usize = 4 + 32;
/// LOCK4denied, the owner's name with the most that NFS4_OPAQUE_LIMIT allows.
const DENIED: usize = 8 + 8 + 4 + 8 + 4 + 1024;
/// open_delegation4. The name in its nfsace4 has no limit; no name service gives one of 1024 bytes.
const DELEGATION: usize = 4 + STATEID + 4 + 12 + 12 + 4 + 1024;
/// write_response4.
const WRITE_RESPONSE: usize = 4 + STATEID + 8 + 4 + VERIFIER;

/// The operations in the order of their numbers, without a gap except before ILLEGAL: each with its arguments, and its results
/// where its status is NFS4_OK.
const OPERATIONS: &[Row] = &[
    row(3, |w| fixed(w, 4, 8), |w| w.skip(8)), // ACCESS
    row(4, |w| fixed(w, 4 + STATEID, STATEID), |w| w.skip(STATEID)), // CLOSE
    row(5, |w| fixed(w, 12, VERIFIER), |w| w.skip(VERIFIER)), // COMMIT
    row(6, create, changed_and_set),           // CREATE
    row(7, |w| fixed(w, 8, 0), nothing),       // DELEGPURGE
    row(8, |w| fixed(w, STATEID, 0), nothing), // DELEGRETURN
    row(9, getattr, attributes),               // GETATTR
    row(10, |w| fixed(w, 0, 4 + FH), |w| w.opaque()), // GETFH
    row(11, |w| named(w, CHANGE), |w| w.skip(CHANGE)), // LINK
    row(12, lock, |w| w.skip(STATEID)),        // LOCK
    row(13, lockt, nothing),                   // LOCKT
    row(14, |w| fixed(w, 8 + STATEID + 16, STATEID), |w| w.skip(STATEID)), // LOCKU
    row(15, |w| named(w, 0), nothing),         // LOOKUP
    row(16, nothing, nothing),                 // LOOKUPP
    row(17, attributes, nothing),              // NVERIFY
    row(18, open, opened),                     // OPEN
    row(19, |w| fixed(w, 4, 0), nothing),      // OPENATTR
    row(20, |w| fixed(w, STATEID + 4, STATEID), |w| w.skip(STATEID)), // OPEN_CONFIRM
    row(21, |w| fixed(w, STATEID + 12, STATEID), |w| w.skip(STATEID)), // OPEN_DOWNGRADE
    row(22, |w| named(w, 0), nothing),         // PUTFH
    row(23, nothing, nothing),                 // PUTPUBFH
    row(24, nothing, nothing),                 // PUTROOTFH
    row(25, read, read_results),               // READ
    row(26, readdir, readdir_results),         // READDIR
    row(27, readlink, |w| w.item()),           // READLINK
    row(28, |w| named(w, CHANGE), |w| w.skip(CHANGE)), // REMOVE
    row(29, rename, |w| w.skip(2 * CHANGE)),   // RENAME
    row(30, |w| fixed(w, 8, 0), nothing),      // RENEW
    row(31, nothing, nothing),                 // RESTOREFH
    row(32, nothing, nothing),                 // SAVEFH
    row(33, |w| unbounded(w, |w| w.opaque()), secinfo_results), // SECINFO
    row(34, setattr, bitmap),                  // SETATTR
    row(35, |w| unbounded(w, setclientid), |w| w.skip(8 + VERIFIER)), // SETCLIENTID
    row(36, |w| fixed(w, 8 + VERIFIER, 0), nothing), // SETCLIENTID_CONFIRM
    row(37, attributes, nothing),              // VERIFY
    row(38, write, |w| w.skip(8 + VERIFIER)),  // WRITE
    row(39, owner, nothing),                   // RELEASE_LOCKOWNER
    // From minor version 1 on.
    row(40, backchannel_ctl, nothing), // BACKCHANNEL_CTL
    row(41, |w| fixed(w, SESSIONID + 8, SESSIONID + 8), |w| w.skip(SESSIONID + 8)), // BIND_CONN_TO_SESSION
    row(42, |w| unbounded(w, exchange_id), exchange_id_results), // EXCHANGE_ID
    row(43, create_session, create_session_results), // CREATE_SESSION
    row(44, |w| fixed(w, SESSIONID, 0), nothing), // DESTROY_SESSION
    row(45, |w| fixed(w, STATEID, 0), nothing), // FREE_STATEID
    row(46, get_dir_delegation, get_dir_delegation_results), // GET_DIR_DELEGATION
    row(47, getdeviceinfo, getdeviceinfo_results), // GETDEVICEINFO
    row(48, getdevicelist, getdevicelist_results), // GETDEVICELIST
    row(49, layoutcommit, |w| optional(w, 8)), // LAYOUTCOMMIT
    row(50, layoutget, layoutget_results), // LAYOUTGET
    row(51, layoutreturn, |w| optional(w, STATEID)), // LAYOUTRETURN
    row(52, |w| unbounded(w, |w| w.skip(4)), secinfo_results), // SECINFO_NO_NAME
    row(53, |w| fixed(w, SESSIONID + 16, SESSIONID + 20), |w| w.skip(SESSIONID + 20)), // SEQUENCE
    row(54, |w| unbounded(w, two_opaques), |w| w.opaque()), // SET_SSV
    row(55, test_stateid, words),      // TEST_STATEID
    row(56, want_delegation, delegation), // WANT_DELEGATION
    row(57, |w| fixed(w, 8, 0), nothing), // DESTROY_CLIENTID
    row(58, |w| fixed(w, 4, 0), nothing), // RECLAIM_COMPLETE
    // From minor version 2 on.
    row(59, |w| fixed(w, STATEID + 16, 0), nothing), // ALLOCATE
    row(60, copy, copy_results),                     // COPY
    row(61, |w| unbounded(w, copy_notify), copy_notify_results), // COPY_NOTIFY
    row(62, |w| fixed(w, STATEID + 16, 0), nothing), // DEALLOCATE
    row(63, io_advise, bitmap),                      // IO_ADVISE
    row(64, layouterror, nothing),                   // LAYOUTERROR
    row(65, layoutstats, nothing),                   // LAYOUTSTATS
    row(66, |w| fixed(w, STATEID, 0), nothing),      // OFFLOAD_CANCEL
    row(67, |w| fixed(w, STATEID, 16), offload_status_results), // OFFLOAD_STATUS
    row(68, |w| unbounded(w, |w| w.skip(STATEID + 12)), read_plus_results), // READ_PLUS
    row(69, |w| fixed(w, STATEID + 12, 12), |w| w.skip(12)), // SEEK
    row(70, write_same, write_response),             // WRITE_SAME
    row(71, |w| fixed(w, 2 * STATEID + 24, 0), nothing), // CLONE
    // RFC 8276.
    row(72, |w| unbounded(w, |w| w.opaque()), |w| w.opaque()), // GETXATTR
    row(73, setxattr, |w| w.skip(CHANGE)),                     // SETXATTR
    row(74, listxattrs, listxattrs_results),                   // LISTXATTRS
    row(75, |w| named(w, CHANGE), |w| w.skip(CHANGE)),         // REMOVEXATTR
    row(ILLEGAL, nothing, nothing),                            // ILLEGAL
];

const ILLEGAL: u32 = 10044;

// The four operations with eligible items first, the others in the order of the table.

fn read(walk: &mut Walk<'_>) -> Walked {
    walk.skip(STATEID + 8)?;
    let count = walk.word()?;
    walk.reply(4);
    walk.result(count as usize);
    Ok(())
}

fn read_results(walk: &mut Walk<'_>) -> Walked {
    // eof
    walk.skip(4)?;
    walk.item()
}

fn readlink(walk: &mut Walk<'_>) -> Walked {
    walk.result(PATH);
    Ok(())
}

fn write(walk: &mut Walk<'_>) -> Walked {
    // Offset and stable.
    walk.skip(STATEID + 12)?;
    walk.item()?;
    walk.reply(8 + VERIFIER);
    Ok(())
}

fn create(walk: &mut Walk<'_>) -> Walked {
    const BLK: u32 = 3;
    const CHR: u32 = 4;
    const LNK: u32 = 5;
    match walk.word()? {
        LNK => walk.item()?,
        BLK | CHR => walk.skip(8)?,
        _ => {}
    }
    walk.opaque()?;
    attributes(walk)?;
    walk.reply(CHANGE + BITMAP);
    Ok(())
}

fn changed_and_set(walk: &mut Walk<'_>) -> Walked {
    walk.skip(CHANGE)?;
    bitmap(walk)
}

fn getattr(walk: &mut Walk<'_>) -> Walked {
    // RFC 8267 §6.2.1: attributes such as ACLs "make it difficult to predict the maximum size".
    unbounded(walk, bitmap)
}

fn lock(walk: &mut Walk<'_>) -> Walked {
    // Type, reclaim, offset, length.
    walk.skip(24)?;
    match walk.word()? {
        0 => walk.skip(STATEID + 4)?,
        1 => {
            walk.skip(4 + STATEID + 4)?;
            owner(walk)?;
        }
        _ => return Err(Stop::Unknown),
    }
    walk.reply(DENIED);
    Ok(())
}

fn lockt(walk: &mut Walk<'_>) -> Walked {
    // Type, offset, length.
    walk.skip(20)?;
    owner(walk)?;
    walk.reply(DENIED);
    Ok(())
}

fn open(walk: &mut Walk<'_>) -> Walked {
    // Sequence, access, deny.
    walk.skip(12)?;
    owner(walk)?;
    const CREATE: u32 = 1;
    if walk.word()? == CREATE {
        // createhow4
        match walk.word()? {
            0 | 1 => attributes(walk)?,
            2 => walk.skip(VERIFIER)?,
            3 => {
                walk.skip(VERIFIER)?;
                attributes(walk)?;
            }
            _ => return Err(Stop::Unknown),
        }
    }
    // open_claim4
    match walk.word()? {
        0 | 3 => walk.opaque()?,
        1 => walk.skip(4)?,
        2 => {
            walk.skip(STATEID)?;
            walk.opaque()?;
        }
        4 | 6 => {}
        5 => walk.skip(STATEID)?,
        _ => return Err(Stop::Unknown),
    }
    walk.reply(STATEID + CHANGE + 4 + BITMAP + DELEGATION);
    Ok(())
}

fn opened(walk: &mut Walk<'_>) -> Walked {
    walk.skip(STATEID + CHANGE + 4)?;
    bitmap(walk)?;
    delegation(walk)
}

/// open_delegation4, with the two types of RFC 9754.
fn delegation(walk: &mut Walk<'_>) -> Walked {
    match walk.word()? {
        0 => return Ok(()),
        1 | 4 => walk.skip(STATEID + 4)?,
        // The space limit: its type and 8 bytes, whichever it is.
        2 | 5 => walk.skip(STATEID + 4 + 12)?,
        3 => {
            const CONTENTION: u32 = 1;
            const RESOURCE: u32 = 2;
            let will_tell = matches!(walk.word()?, CONTENTION | RESOURCE);
            return if will_tell { walk.skip(4) } else { Ok(()) };
        }
        _ => return Err(Stop::Unknown),
    }
    // nfsace4
    walk.skip(12)?;
    walk.opaque()
}

fn readdir(walk: &mut Walk<'_>) -> Walked {
    // Cookie, verifier, dircount.
    walk.skip(8 + VERIFIER + 4)?;
    let maxcount = walk.word()?;
    bitmap(walk)?;
    // RFC 8881 §18.23.3: "The maxcount field of the request represents the maximum total size of all of the
    // data being returned within the READDIR4resok structure and includes the XDR overhead."
    walk.reply(maxcount as usize);
    Ok(())
}

fn readdir_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(VERIFIER)?;
    while walk.word()? != 0 {
        walk.skip(8)?;
        walk.opaque()?;
        attributes(walk)?;
    }
    // eof
    walk.skip(4)
}

fn rename(walk: &mut Walk<'_>) -> Walked {
    two_opaques(walk)?;
    walk.reply(2 * CHANGE);
    Ok(())
}

/// SECINFO4resok: flavors, RPCSEC_GSS (6) with an OID, a quality and a service.
fn secinfo_results(walk: &mut Walk<'_>) -> Walked {
    walk.list(|walk| {
        if walk.word()? == 6 {
            walk.opaque()?;
            walk.skip(8)?;
        }
        Ok(())
    })?;
    Ok(())
}

fn setattr(walk: &mut Walk<'_>) -> Walked {
    walk.skip(STATEID)?;
    attributes(walk)?;
    walk.reply(BITMAP);
    Ok(())
}

fn setclientid(walk: &mut Walk<'_>) -> Walked {
    // Verifier and id; program, netid, address; ident.
    walk.skip(VERIFIER)?;
    walk.opaque()?;
    walk.skip(4)?;
    two_opaques(walk)?;
    walk.skip(4)
}

fn backchannel_ctl(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    callback_security(walk)
}

/// callback_sec_parms4<>
fn callback_security(walk: &mut Walk<'_>) -> Walked {
    const AUTH_NONE: u32 = 0;
    const AUTH_SYS: u32 = 1;
    const RPCSEC_GSS: u32 = 6;
    walk.list(|walk| match walk.word()? {
        AUTH_NONE => Ok(()),
        AUTH_SYS => {
            // Stamp, machine; uid, gid; gids.
            walk.skip(4)?;
            walk.opaque()?;
            walk.skip(8)?;
            words(walk)
        }
        RPCSEC_GSS => {
            walk.skip(4)?;
            two_opaques(walk)
        }
        _ => Err(Stop::Unknown),
    })?;
    Ok(())
}

fn exchange_id(walk: &mut Walk<'_>) -> Walked {
    // Owner and flags.
    walk.skip(VERIFIER)?;
    walk.opaque()?;
    walk.skip(4)?;
    if protected_operations(walk)? {
        // Two lists of algorithms; window and number of handles.
        walk.list(Walk::opaque)?;
        walk.list(Walk::opaque)?;
        walk.skip(8)?;
    }
    implementation(walk)
}

fn exchange_id_results(walk: &mut Walk<'_>) -> Walked {
    // Client, sequence, flags.
    walk.skip(16)?;
    if protected_operations(walk)? {
        // Two algorithms, a length, the window; handles.
        walk.skip(16)?;
        walk.list(Walk::opaque)?;
    }
    // Server owner and scope.
    walk.skip(8)?;
    two_opaques(walk)?;
    implementation(walk)
}

/// What state_protect4_a and state_protect4_r begin with; returns whether SP4_SSV's own part follows.
fn protected_operations(walk: &mut Walk<'_>) -> Result<bool, Stop> {
    const NONE: u32 = 0;
    const MACH_CRED: u32 = 1;
    const SSV: u32 = 2;
    let how = walk.word()?;
    match how {
        NONE => {}
        MACH_CRED | SSV => {
            bitmap(walk)?;
            bitmap(walk)?;
        }
        _ => return Err(Stop::Unknown),
    }
    Ok(how == SSV)
}

/// nfs_impl_id4<1>
fn implementation(walk: &mut Walk<'_>) -> Walked {
    walk.list(|walk| {
        two_opaques(walk)?;
        walk.skip(TIME)
    })?;
    Ok(())
}

/// channel_attrs4 of a session's two channels.
fn channels(walk: &mut Walk<'_>) -> Walked {
    for _ in 0..2 {
        walk.skip(24)?;
        words(walk)?;
    }
    Ok(())
}

fn create_session(walk: &mut Walk<'_>) -> Walked {
    // Client, sequence, flags.
    walk.skip(16)?;
    channels(walk)?;
    // The callback program.
    walk.skip(4)?;
    callback_security(walk)?;
    walk.reply(SESSIONID + 8 + 2 * 32);
    Ok(())
}

fn create_session_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(SESSIONID + 8)?;
    channels(walk)
}

fn get_dir_delegation(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    bitmap(walk)?;
    walk.skip(2 * TIME)?;
    bitmap(walk)?;
    bitmap(walk)?;
    walk.reply(4 + VERIFIER + STATEID + 3 * BITMAP);
    Ok(())
}

fn get_dir_delegation_results(walk: &mut Walk<'_>) -> Walked {
    match walk.word()? {
        0 => {
            walk.skip(VERIFIER + STATEID)?;
            bitmap(walk)?;
            bitmap(walk)?;
            bitmap(walk)
        }
        1 => walk.skip(4),
        _ => Err(Stop::Unknown),
    }
}

fn getdeviceinfo(walk: &mut Walk<'_>) -> Walked {
    // Device and layout type.
    walk.skip(DEVICEID + 4)?;
    let maxcount = walk.word()?;
    bitmap(walk)?;
    // RFC 8881 §18.40.3: "This maximum size represents all of the data being returned within the
    // GETDEVICEINFO4resok structure". A refusal says in 4 bytes what would have been enough.
    walk.reply((maxcount as usize).max(4));
    Ok(())
}

fn getdeviceinfo_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    walk.opaque()?;
    bitmap(walk)
}

fn getdevicelist(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    let devices = walk.word()? as usize;
    // Cookie and verifier.
    walk.skip(8 + VERIFIER)?;
    walk.reply(8 + VERIFIER + 4 + 4);
    walk.reply(devices.saturating_mul(DEVICEID));
    Ok(())
}

fn getdevicelist_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(8 + VERIFIER)?;
    walk.list(|walk| walk.skip(DEVICEID))?;
    walk.skip(4)
}

fn layoutcommit(walk: &mut Walk<'_>) -> Walked {
    // Offset, length, reclaim.
    walk.skip(20 + STATEID)?;
    optional(walk, 8)?;
    optional(walk, TIME)?;
    walk.skip(4)?;
    walk.opaque()?;
    walk.reply(12);
    Ok(())
}

fn layoutget(walk: &mut Walk<'_>) -> Walked {
    // Signal, type, iomode; offset, length, minimum.
    walk.skip(12 + 24 + STATEID)?;
    let maxcount = walk.word()?;
    // RFC 8881 §18.43.3: "The loga_maxcount field specifies the maximum layout size (in bytes)": in addition there are the flag,
    // the stateid and the number of layouts.
    walk.reply(4 + STATEID + 4);
    walk.reply(maxcount as usize);
    Ok(())
}

fn layoutget_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4 + STATEID)?;
    walk.list(|walk| {
        // Offset, length, iomode, type.
        walk.skip(24)?;
        walk.opaque()
    })?;
    Ok(())
}

fn layoutreturn(walk: &mut Walk<'_>) -> Walked {
    // Reclaim, type, iomode.
    walk.skip(12)?;
    const FILE: u32 = 1;
    if walk.word()? == FILE {
        walk.skip(16 + STATEID)?;
        walk.opaque()?;
    }
    walk.reply(4 + STATEID);
    Ok(())
}

fn test_stateid(walk: &mut Walk<'_>) -> Walked {
    let stateids = walk.list(|walk| walk.skip(STATEID))?;
    walk.reply(4 + 4 * stateids);
    Ok(())
}

fn want_delegation(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    // deleg_claim4
    match walk.word()? {
        1 => walk.skip(4)?,
        4 | 6 => {}
        _ => return Err(Stop::Unknown),
    }
    walk.reply(DELEGATION);
    Ok(())
}

fn copy(walk: &mut Walk<'_>) -> Walked {
    // Two offsets and a count; consecutive, synchronous.
    walk.skip(2 * STATEID + 24 + 8)?;
    walk.list(netloc)?;
    walk.reply(WRITE_RESPONSE + 8);
    Ok(())
}

fn copy_results(walk: &mut Walk<'_>) -> Walked {
    write_response(walk)?;
    walk.skip(8)
}

fn copy_notify(walk: &mut Walk<'_>) -> Walked {
    walk.skip(STATEID)?;
    netloc(walk)
}

fn copy_notify_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(TIME + STATEID)?;
    walk.list(netloc)?;
    Ok(())
}

fn netloc(walk: &mut Walk<'_>) -> Walked {
    match walk.word()? {
        // A name, a URL.
        1 | 2 => walk.opaque(),
        // A netaddr4.
        3 => two_opaques(walk),
        _ => Err(Stop::Unknown),
    }
}

fn write_response(walk: &mut Walk<'_>) -> Walked {
    walk.list(|walk| walk.skip(STATEID))?;
    walk.skip(12 + VERIFIER)
}

fn io_advise(walk: &mut Walk<'_>) -> Walked {
    walk.skip(STATEID + 16)?;
    bitmap(walk)?;
    walk.reply(BITMAP);
    Ok(())
}

fn layouterror(walk: &mut Walk<'_>) -> Walked {
    walk.skip(16 + STATEID)?;
    walk.list(|walk| walk.skip(DEVICEID + 8))?;
    Ok(())
}

fn layoutstats(walk: &mut Walk<'_>) -> Walked {
    // Offset, length; counts and bytes read and written; device; layout type.
    walk.skip(16 + STATEID + 32 + DEVICEID + 4)?;
    walk.opaque()
}

fn offload_status_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(8)?;
    words(walk)
}

fn read_plus_results(walk: &mut Walk<'_>) -> Walked {
    const DATA: u32 = 0;
    const HOLE: u32 = 1;
    // eof
    walk.skip(4)?;
    walk.list(|walk| match walk.word()? {
        // RFC 8267 §6.1 does not name it: its number and sizes cannot be predicted.
        DATA => {
            walk.skip(8)?;
            walk.opaque()
        }
        HOLE => walk.skip(16),
        _ => Ok(()),
    })?;
    Ok(())
}

fn write_same(walk: &mut Walk<'_>) -> Walked {
    // Stable; app_data_block4 up to its pattern, which RFC 8267 §6.1 does not name.
    walk.skip(STATEID + 4 + 44)?;
    walk.opaque()?;
    walk.reply(WRITE_RESPONSE);
    Ok(())
}

fn setxattr(walk: &mut Walk<'_>) -> Walked {
    walk.skip(4)?;
    two_opaques(walk)?;
    walk.reply(CHANGE);
    Ok(())
}

fn listxattrs(walk: &mut Walk<'_>) -> Walked {
    walk.skip(8)?;
    let maxcount = walk.word()?;
    // Besides the names: cookie, their number, eof.
    walk.reply(16);
    walk.reply(maxcount as usize);
    Ok(())
}

fn listxattrs_results(walk: &mut Walk<'_>) -> Walked {
    walk.skip(8)?;
    walk.list(Walk::opaque)?;
    walk.skip(4)
}

// What several operations share.

/// Arguments that are one counted opaque, such as a name.
fn named(walk: &mut Walk<'_>, results: usize) -> Walked {
    walk.opaque()?;
    walk.reply(results);
    Ok(())
}

fn unbounded(walk: &mut Walk<'_>, arguments: fn(&mut Walk<'_>) -> Walked) -> Walked {
    walk.unbounded();
    arguments(walk)
}

/// A flag, and `bytes` where it is TRUE.
fn optional(walk: &mut Walk<'_>, bytes: usize) -> Walked {
    if walk.word()? != 0 { walk.skip(bytes) } else { Ok(()) }
}

fn words(walk: &mut Walk<'_>) -> Walked {
    let count = walk.word()?;
    walk.skip((count as usize).saturating_mul(4))
}

/// bitmap4
fn bitmap(walk: &mut Walk<'_>) -> Walked {
    words(walk)
}

/// fattr4: a bitmap and the values.
fn attributes(walk: &mut Walk<'_>) -> Walked {
    bitmap(walk)?;
    walk.opaque()
}

/// state_owner4
fn owner(walk: &mut Walk<'_>) -> Walked {
    walk.skip(8)?;
    walk.opaque()
}

fn two_opaques(walk: &mut Walk<'_>) -> Walked {
    walk.opaque()?;
    walk.opaque()
}

/// The numbers of all operations that there are.
#[cfg(test)]
pub(super) fn numbers() -> Vec<u32> {
    OPERATIONS.iter().map(|row| row.number).collect()
}
