//! Programs and procedures by name: those that are met over RDMA, and those of /etc/rpc.

use std::collections::HashMap;

/// Names of programs.
pub struct Names(HashMap<u32, String>);

impl Names {
    /// With what this host's /etc/rpc knows beside; a host without one has fewer.
    pub fn of_this_host() -> Names {
        Names::from(&std::fs::read_to_string("/etc/rpc").unwrap_or_default())
    }

    fn from(text: &str) -> Names {
        let mut names = HashMap::new();
        for line in text.lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            if let (Some(name), Some(Ok(number))) = (words.next(), words.next().map(str::parse)) {
                names.entry(number).or_insert_with(|| name.to_owned());
            }
        }
        for (number, name) in [
            (100_000, "rpcbind"),
            (100_003, "nfs"),
            (100_005, "mount"),
            (100_021, "nlm"),
            (100_024, "status"),
            (100_227, "nfs_acl"),
            (crate::rpc::PROGRAM, "perf"),
        ] {
            names.insert(number, name.to_owned());
        }
        Names(names)
    }

    /// `nfs 3 WRITE`, or with numbers where there are no names.
    pub fn procedure(&self, [program, version, procedure]: [u32; 3]) -> String {
        let name = self.0.get(&program).cloned();
        let known = name.is_some();
        let name = name.unwrap_or_else(|| format!("program {program}"));
        match known_procedures(program, version).get(procedure as usize) {
            Some(word) => format!("{name} {version} {word}"),
            None if procedure == 0 => format!("{name} {version} NULL"),
            None if known => format!("{name} {version} procedure {procedure}"),
            None => format!("{name} version {version} procedure {procedure}"),
        }
    }
}

fn known_procedures(program: u32, version: u32) -> &'static [&'static str] {
    match (program, version) {
        (100_003, 2) => &[
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
        ],
        (100_003, 3) => &[
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
        ],
        (100_003, 4) => &["NULL", "COMPOUND"],
        (100_005, _) => &["NULL", "MNT", "DUMP", "UMNT", "UMNTALL", "EXPORT"],
        (100_227, _) => &["NULL", "GETACL", "SETACL"],
        (crate::rpc::PROGRAM, 1) => &["NULL", "WRITE", "READ", "STATUS"],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_name_is_shown_by_it() {
        let names = Names::from("# rpc\nwalld\t100008 rwall shutdown\nportmapper 100000 sunrpc\nx y\n");
        assert_eq!(names.procedure([100003, 3, 7]), "nfs 3 WRITE");
        assert_eq!(names.procedure([100003, 3, 99]), "nfs 3 procedure 99");
        assert_eq!(names.procedure([100008, 1, 2]), "walld 1 procedure 2");
        assert_eq!(names.procedure([100000, 4, 0]), "rpcbind 4 NULL");
        assert_eq!(names.procedure([7, 1, 2]), "program 7 version 1 procedure 2");
    }
}
