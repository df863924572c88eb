//! The bindings of NFS versions 2 and 3, of NFSACL, and of the NFSv4 callbacks (RFC 8267).
//!
//! RFC 8267 §4.1: file data of WRITE and READ, the target of SYMLINK and READLINK are eligible; nothing else is. The
//! sizes of results are those of the XDR in RFC 1094 and RFC 1813.
#![forbid(unsafe_code)]

use super::{Walk, Walked, Walker};

const NFS: u32 = 100_003;
const NFSACL: u32 = 100_227;
/// RFC 7530 §19.1 and RFC 8881 §23: the callback program has this number unless client and server agree on another.
const CALLBACK: u32 = 0x4000_0000;

/// Longest path of NFS version 2 (RFC 1094 §2.3: MAXPATHLEN).
const PATH_V2: usize = 1024;
/// Longest target of a symbolic link that we expect over NFS version 3, which has no limit of its own: PATH_MAX of the
/// systems that serve it.
const PATH_V3: usize = 4096;
/// Most data of a READ of version 2 (RFC 1094 §2.3: MAXDATA).
const DATA_V2: usize = 8192;

pub type Add<'a> = &'a mut dyn FnMut(u32, u32, u32, Walker, Walker);

type Walks = fn(&mut Walk<'_>) -> Walked;

/// Arguments of which nothing is eligible, for results of at most so many bytes.
fn plain(bytes: usize) -> Walker {
    Box::new(move |walk| {
        walk.reply(bytes);
        Ok(())
    })
}

fn nothing(_: &mut Walk<'_>) -> Walked {
    Ok(())
}

pub fn add(add: Add<'_>) {
    version_2(add);
    version_3(add);
    // RFC 8267 §4.2: the client decides how long an ACL may be; nothing of it is eligible.
    for version in [1, 2, 3] {
        add(NFSACL, version, 0, plain(0), Box::new(nothing));
        for procedure in 1..=5 {
            add(NFSACL, version, procedure, Box::new(nothing), Box::new(nothing));
        }
    }
    for procedure in [0, 1] {
        add(CALLBACK, 1, procedure, Box::new(nothing), Box::new(nothing));
    }
}

fn version_2(add: Add<'_>) {
    // Attributes have 68 bytes, a handle 32, a status 4.
    let sizes = [0, 72, 72, 0, 104, 0, 0, 0, 0, 104, 4, 4, 4, 4, 104, 4, 0, 24];
    for (procedure, bytes) in (0..).zip(sizes) {
        let (arguments, results): (Walker, Walks) = match procedure {
            5 => (Box::new(readlink_2), readlink_2_results),
            6 => (Box::new(read_2), read_2_results),
            8 => (Box::new(write_2), nothing),
            13 => (Box::new(symlink_2), nothing),
            16 => (Box::new(readdir_2), nothing),
            _ => (plain(bytes), nothing),
        };
        add(NFS, 2, procedure, arguments, Box::new(results));
    }
}

fn readlink_2(walk: &mut Walk<'_>) -> Walked {
    walk.reply(4);
    walk.result(PATH_V2);
    walk.skip(32)
}

fn readlink_2_results(walk: &mut Walk<'_>) -> Walked {
    if walk.word()? == 0 { walk.item() } else { Ok(()) }
}

fn read_2(walk: &mut Walk<'_>) -> Walked {
    walk.skip(32)?;
    walk.word()?;
    let count = walk.word()? as usize;
    walk.word()?;
    walk.reply(72);
    walk.result(count.min(DATA_V2));
    Ok(())
}

fn read_2_results(walk: &mut Walk<'_>) -> Walked {
    if walk.word()? != 0 {
        return Ok(());
    }
    walk.skip(68)?;
    walk.item()
}

fn write_2(walk: &mut Walk<'_>) -> Walked {
    walk.reply(72);
    walk.skip(32 + 12)?;
    walk.item()
}

fn symlink_2(walk: &mut Walk<'_>) -> Walked {
    walk.reply(4);
    walk.skip(32)?;
    walk.opaque()?;
    walk.item()?;
    walk.skip(32)
}

fn readdir_2(walk: &mut Walk<'_>) -> Walked {
    walk.skip(32 + 4)?;
    let count = walk.word()? as usize;
    // RFC 1094 §2.2.17: the count bounds the entries; status, end of list and eof come on top.
    walk.reply(count.saturating_add(12));
    Ok(())
}

fn version_3(add: Add<'_>) {
    // READLINK, READ, WRITE, SYMLINK, READDIR and READDIRPLUS have walks of their own.
    let sizes =
        [0, 88, 120, 248, 96, 0, 0, 0, 280, 280, 0, 280, 120, 120, 236, 208, 0, 0, 144, 140, 116, 128];
    for (procedure, bytes) in (0..).zip(sizes) {
        let (arguments, results): (Walker, Walks) = match procedure {
            5 => (Box::new(readlink_3), readlink_3_results),
            6 => (Box::new(read_3), read_3_results),
            7 => (Box::new(write_3), nothing),
            10 => (Box::new(symlink_3), nothing),
            16 => (Box::new(readdir_3), nothing),
            17 => (Box::new(readdirplus_3), nothing),
            _ => (plain(bytes), nothing),
        };
        add(NFS, 3, procedure, arguments, Box::new(results));
    }
}

/// `post_op_attr`: a word, and 84 bytes if it is TRUE.
fn post_op_attributes(walk: &mut Walk<'_>) -> Walked {
    if walk.word()? == 0 { Ok(()) } else { walk.skip(84) }
}

fn readlink_3(walk: &mut Walk<'_>) -> Walked {
    walk.reply(92);
    walk.result(PATH_V3);
    walk.opaque()
}

fn readlink_3_results(walk: &mut Walk<'_>) -> Walked {
    let status = walk.word()?;
    post_op_attributes(walk)?;
    if status == 0 { walk.item() } else { Ok(()) }
}

fn read_3(walk: &mut Walk<'_>) -> Walked {
    walk.opaque()?;
    walk.hyper()?;
    let count = walk.word()? as usize;
    walk.reply(100);
    walk.result(count);
    Ok(())
}

fn read_3_results(walk: &mut Walk<'_>) -> Walked {
    let status = walk.word()?;
    post_op_attributes(walk)?;
    if status != 0 {
        return Ok(());
    }
    walk.skip(8)?;
    walk.item()
}

fn write_3(walk: &mut Walk<'_>) -> Walked {
    walk.reply(136);
    walk.opaque()?;
    walk.skip(8 + 4 + 4)?;
    walk.item()
}

fn symlink_3(walk: &mut Walk<'_>) -> Walked {
    walk.reply(280);
    walk.opaque()?;
    walk.opaque()?;
    settable_attributes(walk)?;
    walk.item()
}

/// `sattr3`: mode, uid and gid, size, and two times, each behind a word that says whether it is there.
fn settable_attributes(walk: &mut Walk<'_>) -> Walked {
    for bytes in [4, 4, 4, 8] {
        if walk.word()? != 0 {
            walk.skip(bytes)?;
        }
    }
    for _ in 0..2 {
        // SET_TO_CLIENT_TIME alone has a time.
        if walk.word()? == 2 {
            walk.skip(8)?;
        }
    }
    Ok(())
}

fn readdir_3(walk: &mut Walk<'_>) -> Walked {
    walk.opaque()?;
    walk.skip(8 + 8)?;
    let count = walk.word()? as usize;
    // RFC 1813 §3.3.16: count is "The maximum size of the READDIR3resok structure, in bytes." The status comes on top.
    walk.reply(count.saturating_add(96));
    Ok(())
}

fn readdirplus_3(walk: &mut Walk<'_>) -> Walked {
    walk.opaque()?;
    walk.skip(8 + 8 + 4)?;
    let most = walk.word()? as usize;
    walk.reply(most.saturating_add(96));
    Ok(())
}
