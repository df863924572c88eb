//! Names of RPC programs and of their procedures: from /etc/rpc, and a small table for what it lacks.

use std::collections::HashMap;

/// The names.
pub struct Programs(HashMap<u32, String>);

/// What rpc(5) has on most systems, for those without the file.
const KNOWN: &[(u32, &str)] = &[
    (100_000, "portmapper"),
    (100_003, "nfs"),
    (100_005, "mountd"),
    (100_011, "rquotad"),
    (100_004, "ypserv"),
    (100_021, "nlockmgr"),
    (100_024, "status"),
    (100_227, "nfs_acl"),
    (0x4000_0000, "nfs4_cb"),
    (crate::rpc::PROGRAM, "perf"),
];

const NFS2: &[&str] = &[
    "NULL",
    "GETATTR",
    "SETATTR",
    "ROOT",
    "LOOKUP",
    "READLINK",
    "READ",
    "WRITECACHE",
    "WRITE",
    "CREATE",
    "REMOVE",
    "RENAME",
    "LINK",
    "SYMLINK",
    "MKDIR",
    "RMDIR",
    "READDIR",
    "STATFS",
];
const NFS3: &[&str] = &[
    "NULL",
    "GETATTR",
    "SETATTR",
    "LOOKUP",
    "ACCESS",
    "READLINK",
    "READ",
    "WRITE",
    "CREATE",
    "MKDIR",
    "SYMLINK",
    "MKNOD",
    "REMOVE",
    "RMDIR",
    "RENAME",
    "LINK",
    "READDIR",
    "READDIRPLUS",
    "FSSTAT",
    "FSINFO",
    "PATHCONF",
    "COMMIT",
];
const NFS4: &[&str] = &["NULL", "COMPOUND"];
const NFS4_CB: &[&str] = &["NULL", "CB_COMPOUND"];
const MOUNT: &[&str] = &["NULL", "MNT", "DUMP", "UMNT", "UMNTALL", "EXPORT"];
const PERF: &[&str] = &["NULL", "WRITE", "READ", "STATUS"];
const NFS_ACL: &[&str] = &["NULL", "GETACL", "SETACL", "GETATTR", "ACCESS"];

impl Programs {
    /// Those of this system.
    pub fn read() -> Programs {
        Programs::of(&std::fs::read_to_string("/etc/rpc").unwrap_or_default())
    }

    fn of(text: &str) -> Programs {
        let mut names: HashMap<u32, String> =
            KNOWN.iter().map(|(n, name)| (*n, (*name).to_owned())).collect();
        for line in text.lines() {
            let mut words = line.split('#').next().unwrap_or("").split_whitespace();
            if let (Some(name), Some(Ok(number))) = (words.next(), words.next().map(str::parse)) {
                names.insert(number, crate::watch::plain(name));
            }
        }
        Programs(names)
    }

    /// A program: "nfs", or its number.
    pub fn program(&self, number: u32) -> String {
        match self.0.get(&number) {
            Some(name) => name.clone(),
            // Numbers that users choose are written so (RFC 5531 §8.4).
            None if number >= 0x2000_0000 => format!("{number:#x}"),
            None => number.to_string(),
        }
    }

    /// The number of a program that is named so, or that is written as a number.
    pub fn number(&self, word: &str) -> Option<u32> {
        let written = match word.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => word.parse().ok(),
        };
        written.or_else(|| self.0.iter().find(|(_, name)| *name == word).map(|(number, _)| *number))
    }

    /// What is called: `nfs 3 WRITE`, or with numbers where there are no names.
    pub fn call(&self, [program, version, procedure]: [u32; 3]) -> String {
        let name = self.0.get(&program).cloned().unwrap_or_else(|| format!("program {program}"));
        let word = self.procedure(program, version, procedure);
        let numbered = word.starts_with(|c: char| c.is_ascii_digit());
        let what = if numbered { format!("procedure {word}") } else { word };
        if self.0.contains_key(&program) {
            format!("{name} {version} {what}")
        } else {
            format!("{name} version {version} {what}")
        }
    }

    /// A procedure: "READ", or its number.
    pub fn procedure(&self, program: u32, version: u32, procedure: u32) -> String {
        let table = match (program, version) {
            (100_003, 2) => NFS2,
            (100_003, 3) => NFS3,
            (100_003, 4) => NFS4,
            (0x4000_0000, _) => NFS4_CB,
            (100_005, _) => MOUNT,
            (100_227, _) => NFS_ACL,
            (crate::rpc::PROGRAM, 1) => PERF,
            _ => &["NULL"][..],
        };
        table.get(procedure as usize).map_or_else(|| procedure.to_string(), |name| (*name).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_told_by_its_names() {
        let programs = Programs::of("# rpc\nwalld\t100008 rwall shutdown\nportmapper 100000 sunrpc\nx y\n");
        assert_eq!(programs.call([100_003, 3, 7]), "nfs 3 WRITE");
        assert_eq!(programs.call([100_003, 3, 99]), "nfs 3 procedure 99");
        assert_eq!(programs.call([100_008, 1, 2]), "walld 1 procedure 2");
        assert_eq!(programs.call([100_000, 4, 0]), "portmapper 4 NULL");
        assert_eq!(programs.call([7, 1, 2]), "program 7 version 1 procedure 2");
        assert_eq!(
            (programs.number("walld"), programs.number("0x10"), programs.number("no")),
            (Some(100_008), Some(16), None)
        );
    }

    #[test]
    fn names_come_from_the_file_and_else_from_the_table() {
        let programs = Programs::of("# c\nnfs 100003 nfsprog\nmine\t536870913 # x\nbad x\n\x1b[2J 7\n");
        assert_eq!(programs.program(100_003), "nfs");
        assert_eq!(programs.program(0x2000_0001), "mine");
        assert_eq!(programs.program(100_227), "nfs_acl");
        assert_eq!(programs.program(0x2000_0002), "0x20000002");
        assert_eq!(programs.program(12), "12");
        assert_eq!(programs.program(7), "?[2J");
        assert_eq!(programs.procedure(100_003, 3, 21), "COMMIT");
        assert_eq!(programs.procedure(100_003, 3, 22), "22");
        assert_eq!(programs.procedure(100_003, 4, 1), "COMPOUND");
        assert_eq!(programs.procedure(9, 1, 0), "NULL");
    }
}
