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
    /// The names of this system.
    pub fn read() -> Programs {
        Programs::of(&table())
    }

    fn of(text: &str) -> Programs {
        let mut names: HashMap<u32, String> =
            KNOWN.iter().map(|(n, name)| (*n, (*name).to_owned())).collect();
        for (name, number, _) in lines(text) {
            names.insert(number, crate::words::shown(name));
        }
        Programs(names)
    }

    /// A program: "nfs", or its number.
    pub fn program(&self, number: u32) -> String {
        match self.0.get(&number) {
            Some(name) => name.clone(),
            // Numbers that users choose are written in hexadecimal (RFC 5531 §8.4).
            None if number >= 0x2000_0000 => format!("{number:#x}"),
            None => number.to_string(),
        }
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

/// The number of a program as the user has written it: decimal, hexadecimal with 0x, or a name in /etc/rpc.
pub fn number(word: &str) -> Result<u32, String> {
    let number = match word.strip_prefix("0x") {
        Some(hex) if !hex.starts_with('+') => u32::from_str_radix(hex, 16).ok(),
        _ if word.bytes().all(|byte| byte.is_ascii_digit()) => word.parse().ok(),
        _ => {
            return named(&table(), word)
                .ok_or_else(|| format!("{word:?}: no such program in /etc/rpc, and no number"));
        }
    };
    number.ok_or_else(|| format!("{word:?}: no number of a program"))
}

/// The name of a program, if it has one.
pub fn name(program: u32) -> Option<String> {
    let table = table();
    let line = lines(&table).find(|(_, number, _)| *number == program);
    line.map(|(name, ..)| name.to_owned())
}

/// "100003 (nfs)".
pub fn described(program: u32) -> String {
    name(program).map_or(program.to_string(), |name| format!("{program} ({name})"))
}

fn table() -> String {
    std::fs::read_to_string("/etc/rpc").unwrap_or_default()
}

fn named(table: &str, word: &str) -> Option<u32> {
    let is = |(name, _, others): &(&str, u32, Vec<&str>)| *name == word || others.contains(&word);
    lines(table).find(is).map(|(_, number, _)| number)
}

/// Name, number and other names.
fn lines(table: &str) -> impl Iterator<Item = (&str, u32, Vec<&str>)> {
    table.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        Some((words.next()?, words.next()?.parse().ok()?, words.collect()))
    })
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

    #[test]
    fn a_program_is_found_by_each_of_its_names_and_comments_are_none() {
        let table = "# nfsd 1\nportmapper\t100000\tportmap sunrpc\nnfs 100003 nfsprog # nfsd 2\nbad\n";
        assert_eq!(named(table, "sunrpc"), Some(100_000));
        assert_eq!(named(table, "nfs"), Some(100_003));
        assert_eq!((named(table, "nfsd"), named(table, "2"), named(table, "bad")), (None, None, None));
    }

    #[test]
    fn a_number_is_a_program_and_nothing_near_it_is() {
        assert_eq!((number("9"), number("0x20000001")), (Ok(9), Ok(0x2000_0001)));
        for wrong in ["", "4294967296", "0x", "0x+1", "-1", "+1", "no such program"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
    }
}
