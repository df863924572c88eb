//! Names of programs: those of rpc(5).

use std::fs;

/// The number that somebody has written: decimal, hexadecimal with 0x, or a name of /etc/rpc.
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

/// The name of a program, where it has one.
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
    fs::read_to_string("/etc/rpc").unwrap_or_default()
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
