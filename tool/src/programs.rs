//! Names of RPC programs and of their procedures: from /etc/rpc, and a small table for what it lacks.

use std::collections::HashMap;

/// The names.
pub struct Programs(HashMap<u32, String>);

impl Programs {
    /// Those of this system.
    pub fn read() -> Programs {
        Programs::of(&std::fs::read_to_string("/etc/rpc").unwrap_or_default())
    }

    fn of(text: &str) -> Programs {
        let mut names = HashMap::new();
        for line in text.lines() {
            let mut words = line.split('#').next().unwrap_or("").split_whitespace();
            if let (Some(name), Some(Ok(number))) = (words.next(), words.next().map(str::parse)) {
                names.insert(number, name.to_owned());
            }
        }
        Programs(names)
    }

    /// A program: "nfs", or its number.
    pub fn program(&self, number: u32) -> String {
        self.0.get(&number).cloned().unwrap_or_else(|| number.to_string())
    }

    /// The number of a program that is named so, or that is written as a number.
    pub fn number(&self, word: &str) -> Option<u32> {
        let written = match word.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => word.parse().ok(),
        };
        written.or_else(|| self.0.iter().find(|(_, name)| *name == word).map(|(number, _)| *number))
    }
}
