//! NFS version 2 (RFC 1094) and 3 (RFC 1813), NFSACL, and the frame of version 4 and its callbacks.
//!
//! RFC 8267 §4: "All other argument or result data items in NFS versions 2 and 3 are not DDP-eligible." So the
//! arguments of a procedure without such an item are walked no further than to the words that bound its reply.
//! NFSACL has no eligible item (RFC 8267 §5.2), nor have the callbacks (RFC 8267 §6.5).
#![forbid(unsafe_code)]

use super::{PATH, Row, Walk, Walked, fixed, nfs4, nothing, row};

pub(super) const NFS: u32 = 100_003;
pub(super) const NFSACL: u32 = 100_227;
/// The NFSv4.0 callbacks, by their name in the RFCs; a client may choose another number.
pub(super) const CALLBACK: u32 = 0x4000_0000;

/// Every procedure: program, version and what there is to say about it.
pub(super) fn procedures() -> impl Iterator<Item = (u32, u32, &'static Row)> {
    let tables = [
        (NFS, 2, V2),
        (NFS, 3, V3),
        (NFS, 4, V4),
        (NFSACL, 1, ACL1),
        (NFSACL, 2, ACL2),
        (NFSACL, 3, ACL3),
        (CALLBACK, 1, CALLBACKS),
    ];
    let rows = |(program, version, table): (u32, u32, &'static [Row])| {
        table.iter().map(move |row| (program, version, row))
    };
    tables.into_iter().flat_map(rows)
}

/// fhandle of version 2.
const FH2: usize = 32;
/// fattr of version 2.
const ATTR2: usize = 68;
/// nfspath of version 2 (RFC 1094 §2.2: MAXPATHLEN).
const PATH2: usize = 1024;
/// post_op_attr: the flag and fattr3.
const ATTR3: usize = 4 + 84;
/// wcc_data: pre_op_attr and post_op_attr.
const WCC: usize = 4 + 24 + ATTR3;
/// Results of what creates an object: status, handle, attributes, and those of the directory.
const CREATED: usize = 4 + (4 + 4 + 64) + ATTR3 + WCC;

const V2: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing),                // NULL
    row(1, |w| fixed(w, 0, 4 + ATTR2), nothing),        // GETATTR
    row(2, |w| fixed(w, 0, 4 + ATTR2), nothing),        // SETATTR
    row(3, |w| fixed(w, 0, 0), nothing),                // ROOT
    row(4, |w| fixed(w, 0, 4 + FH2 + ATTR2), nothing),  // LOOKUP
    row(5, readlink2, |w| read_results(w, 0)),          // READLINK
    row(6, read2, |w| read_results(w, ATTR2)),          // READ
    row(7, |w| fixed(w, 0, 0), nothing),                // WRITECACHE
    row(8, write2, nothing),                            // WRITE
    row(9, |w| fixed(w, 0, 4 + FH2 + ATTR2), nothing),  // CREATE
    row(10, |w| fixed(w, 0, 4), nothing),               // REMOVE
    row(11, |w| fixed(w, 0, 4), nothing),               // RENAME
    row(12, |w| fixed(w, 0, 4), nothing),               // LINK
    row(13, symlink2, nothing),                         // SYMLINK
    row(14, |w| fixed(w, 0, 4 + FH2 + ATTR2), nothing), // MKDIR
    row(15, |w| fixed(w, 0, 4), nothing),               // RMDIR
    row(16, readdir2, nothing),                         // READDIR
    row(17, |w| fixed(w, 0, 24), nothing),              // STATFS
];

const V3: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing),                // NULL
    row(1, |w| fixed(w, 0, 88), nothing),               // GETATTR
    row(2, |w| fixed(w, 0, 4 + WCC), nothing),          // SETATTR
    row(3, |w| fixed(w, 0, 72 + 2 * ATTR3), nothing),   // LOOKUP
    row(4, |w| fixed(w, 0, 8 + ATTR3), nothing),        // ACCESS
    row(5, readlink3, |w| read_results3(w, 0)),         // READLINK
    row(6, read3, |w| read_results3(w, 8)),             // READ
    row(7, write3, nothing),                            // WRITE
    row(8, |w| fixed(w, 0, CREATED), nothing),          // CREATE
    row(9, |w| fixed(w, 0, CREATED), nothing),          // MKDIR
    row(10, symlink3, nothing),                         // SYMLINK
    row(11, |w| fixed(w, 0, CREATED), nothing),         // MKNOD
    row(12, |w| fixed(w, 0, 4 + WCC), nothing),         // REMOVE
    row(13, |w| fixed(w, 0, 4 + WCC), nothing),         // RMDIR
    row(14, |w| fixed(w, 0, 4 + 2 * WCC), nothing),     // RENAME
    row(15, |w| fixed(w, 0, 4 + ATTR3 + WCC), nothing), // LINK
    row(16, |w| readdir3(w, 0), nothing),               // READDIR
    row(17, |w| readdir3(w, 4), nothing),               // READDIRPLUS
    row(18, |w| fixed(w, 0, 56 + ATTR3), nothing),      // FSSTAT
    row(19, |w| fixed(w, 0, 52 + ATTR3), nothing),      // FSINFO
    row(20, |w| fixed(w, 0, 28 + ATTR3), nothing),      // PATHCONF
    row(21, |w| fixed(w, 0, 12 + WCC), nothing),        // COMMIT
];

const V4: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing),    // NULL
    row(1, nfs4::arguments, nfs4::results), // COMPOUND
];

const ACL1: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing), // NULL
    row(1, unbounded, nothing),          // GETACL
    row(2, unbounded, nothing),          // SETACL
    row(3, unbounded, nothing),          // GETATTR
    row(4, unbounded, nothing),          // ACCESS
    row(5, unbounded, nothing),          // GETXATTRDIR
];

const ACL2: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing),         // NULL
    row(1, unbounded, nothing),                  // GETACL
    row(2, |w| fixed(w, 0, 4 + ATTR2), nothing), // SETACL
    row(3, |w| fixed(w, 0, 4 + ATTR2), nothing), // GETATTR
    row(4, |w| fixed(w, 0, 8 + ATTR2), nothing), // ACCESS
    row(5, unbounded, nothing),                  // GETXATTRDIR
];

const ACL3: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing),         // NULL
    row(1, unbounded, nothing),                  // GETACL
    row(2, |w| fixed(w, 0, 4 + ATTR3), nothing), // SETACL
    row(3, unbounded, nothing),                  // GETXATTRDIR
];

const CALLBACKS: &[Row] = &[
    row(0, |w| fixed(w, 0, 0), nothing), // CB_NULL
    row(1, unbounded, nothing),          // CB_COMPOUND: RFC 8267 §6.5.1, a CB_GETATTR has attributes
];

fn unbounded(walk: &mut Walk<'_>) -> Walked {
    walk.unbounded();
    Ok(())
}

fn readlink2(walk: &mut Walk<'_>) -> Walked {
    walk.reply(4);
    walk.result(PATH2);
    Ok(())
}

fn read2(walk: &mut Walk<'_>) -> Walked {
    // File and offset.
    walk.skip(FH2 + 4)?;
    let count = walk.word()?;
    walk.reply(4 + ATTR2);
    walk.result(count as usize);
    Ok(())
}

/// Status, `before` bytes where it is 0, and the data.
fn read_results(walk: &mut Walk<'_>, before: usize) -> Walked {
    if walk.word()? != 0 {
        return Ok(());
    }
    walk.skip(before)?;
    walk.item()
}

fn write2(walk: &mut Walk<'_>) -> Walked {
    // File, beginoffset, offset, totalcount.
    walk.skip(FH2 + 12)?;
    walk.item()?;
    walk.reply(4 + ATTR2);
    Ok(())
}

fn symlink2(walk: &mut Walk<'_>) -> Walked {
    walk.skip(FH2)?;
    walk.opaque()?;
    walk.item()?;
    walk.reply(4);
    Ok(())
}

fn readdir2(walk: &mut Walk<'_>) -> Walked {
    // Directory and cookie.
    walk.skip(FH2 + 4)?;
    let count = walk.word()?;
    walk.reply(12);
    walk.reply(count as usize);
    Ok(())
}

fn readlink3(walk: &mut Walk<'_>) -> Walked {
    walk.reply(4 + ATTR3);
    walk.result(PATH);
    Ok(())
}

fn read3(walk: &mut Walk<'_>) -> Walked {
    walk.opaque()?;
    walk.hyper()?;
    let count = walk.word()?;
    walk.reply(4 + ATTR3 + 8);
    walk.result(count as usize);
    Ok(())
}

/// Status, attributes, `before` bytes where the status is 0, and the data.
fn read_results3(walk: &mut Walk<'_>, before: usize) -> Walked {
    if walk.word()? != 0 {
        return Ok(());
    }
    if walk.word()? != 0 {
        walk.skip(ATTR3 - 4)?;
    }
    walk.skip(before)?;
    walk.item()
}

fn write3(walk: &mut Walk<'_>) -> Walked {
    // File; offset, count, stable.
    walk.opaque()?;
    walk.skip(16)?;
    walk.item()?;
    walk.reply(20 + WCC);
    Ok(())
}

fn symlink3(walk: &mut Walk<'_>) -> Walked {
    // Directory and name.
    walk.opaque()?;
    walk.opaque()?;
    // sattr3: mode, uid, gid; size; atime, mtime.
    for (sets, bytes) in [(1, 4), (1, 4), (1, 4), (1, 8), (2, 8), (2, 8)] {
        if walk.word()? == sets {
            walk.skip(bytes)?;
        }
    }
    walk.item()?;
    walk.reply(CREATED);
    Ok(())
}

/// READDIR has a count; READDIRPLUS has a maxcount, with the dircount's 4 bytes before it.
// RFC 1813 §3.3.16: "The size must include all XDR overhead." There is room too for a server that counts only the entries.
fn readdir3(walk: &mut Walk<'_>, before: usize) -> Walked {
    walk.opaque()?;
    // Cookie and verifier.
    walk.skip(16 + before)?;
    let count = walk.word()?;
    walk.reply(4 + ATTR3 + 8 + 8);
    walk.reply(count as usize);
    Ok(())
}
